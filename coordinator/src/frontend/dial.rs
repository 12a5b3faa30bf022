//! Dials the coordinator, or the next leader, until one welcomes this front end.
use std::sync::Arc;
use std::time::Duration;

use shared::actor::link::Connection;
use shared::actor::link::join::{JoinError, REDIAL_MAX, REDIAL_MIN, Unreached, join};
use shared::clock::{Clock, jittered};
use shared::membership::{CoordinatorAddress, Destination};
use shared::protocol::{FrontendHello, FrontendWelcome};
use shared::wire::frame::FrameKind;
use shared::wire::keyring::Keyring;

use super::start_up::StartUp;
use super::{FrontendError, FrontendOptions};

/// The destination that welcomed the front end, the connection, and the welcome.
pub(super) type JoinedLink = (Destination, Connection, FrontendWelcome);

/// Dials forever.
#[derive(Debug)]
pub(super) struct Dialler {
    address: CoordinatorAddress,
    secret: Option<Keyring>,
    /// Spreads the attempts of processes that were cut off together.
    run: u64,
    attempts: u64,
    clock: Arc<dyn Clock>,
    /// Told why no coordinator has welcomed this front end yet.
    told: Option<StartUp>,
}

impl Dialler {
    /// Makes the dialler of a front end with these `options`.
    pub(super) fn new(options: &FrontendOptions, clock: Arc<dyn Clock>) -> Self {
        let (address, secret) = (options.coordinator.clone(), options.secret.clone());
        Self { address, secret, run: options.run, attempts: 0, clock, told: None }
    }

    /// Says there why it is still dialling.
    pub(super) fn telling(self, told: StartUp) -> Self {
        Self { told: Some(told), ..self }
    }

    /// Dials until a coordinator answers: at once the first time, after a short pause if the link
    /// to `last`, which had welcomed this front end, broke; another leader is dialled without a
    /// pause.
    ///
    /// # Errors
    /// [`FrontendError::Refused`].
    pub(super) async fn dial(
        &mut self,
        hello: &FrontendHello,
        last: Option<Destination>,
    ) -> Result<JoinedLink, FrontendError> {
        let (mut wait, mut unreached) = (REDIAL_MIN, Unreached::default());
        let was_welcomed = last.is_some();
        let mut to = match last {
            Some(last) => self.pause(&mut wait, last).await,
            None => self.address.other(None).await,
        };
        loop {
            let kind = FrameKind::FrontendHello;
            let mut address = self.address.clone();
            let joined = tokio::select! {
                joined = join(&to.address, self.secret.as_ref(), kind, hello) => joined,
                _ = address.other(Some(&to)) => {
                    Err(JoinError::Retry("another coordinator leads".to_owned()))
                }
            };
            match joined {
                Ok((connection, welcome)) => return Ok((to, connection, welcome)),
                Err(JoinError::Refused(reason)) => return Err(FrontendError::Refused(reason)),
                // Only workers are told so.
                Err(error @ JoinError::Fetch(_)) => {
                    return Err(FrontendError::Refused(error.to_string()));
                }
                Err(JoinError::Unproven(reason)) if !was_welcomed => {
                    return Err(FrontendError::Refused(reason));
                }
                // One that has been welcomed belongs here, whoever answers now.
                Err(JoinError::Retry(reason) | JoinError::Unproven(reason)) => {
                    if let Some(told) = &self.told {
                        let coordinator = &to.address;
                        told.waits_for(format!(
                            "it dials the coordinator at {coordinator}: {reason}"
                        ));
                    }
                    if let Some(seconds) = unreached.failed(self.clock.now()) {
                        let coordinator = to.address.as_str();
                        tracing::warn!(coordinator, %reason, seconds, "cannot join yet; dialling until it answers");
                    }
                }
            }
            wait = (wait * 2).min(REDIAL_MAX);
            to = self.pause(&mut wait, to).await;
        }
    }

    /// Waits before the next attempt; returns the destination to dial then.
    async fn pause(&mut self, wait: &mut Duration, last: Destination) -> Destination {
        self.attempts += 1;
        let pause = jittered(*wait, self.run, self.attempts);
        match tokio::time::timeout(pause, self.address.other(Some(&last))).await {
            Ok(other) => {
                // A new leader may not listen yet, but will in a moment.
                *wait = REDIAL_MIN;
                other
            }
            Err(_) => last,
        }
    }
}
