//! `tutti coordinator --etcd`: one of several coordinators, which leads or stands by until it does.
use std::time::Duration;

use coordinator::checkpoint::Checkpoints;
use coordinator::coordinator::{Coordinator, CoordinatorOptions, Leadership, PreparedCoordinator};
use coordinator::kept_actors::ActorsLeft;
use coordinator::standby::{self, Standby};
use shared::membership::etcd::ServesSender;
use shared::membership::serves::Difference;
use shared::membership::view::Leader;
use shared::membership::{EtcdMembership, EtcdOptions, PinnedRevision, Record, Role, Serves, View};
use shared::protocol::PROTOCOL_VERSION;
use shared::wire::keyring::Keyring;
use tokio::sync::watch;

use super::etcd::{advertised, no_thread};
use super::heartbeat::{StartUpBeats, beat_to_systemd};
use super::output::print_line;
use super::signals::Signals;
use super::{CliError, etcd, handing_over};

/// How often this process compares the secrets that it accepts with those that etcd has of it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Stands by until this process leads, then serves until told to stop or until another leads.
pub(crate) async fn run(
    options: CoordinatorOptions,
    etcd: EtcdOptions,
    advertise: Option<&str>,
    checkpoints: Option<Duration>,
    patience: Duration,
    start_up: StartUpBeats,
) -> Result<(), CliError> {
    let mut signals = Signals::listen()?;
    let (degree, incarnation) = (options.tensor_parallel, options.run);
    let pinned = options.sources.pinned.clone();
    let prepared = PreparedCoordinator::new(options)?;
    drop(start_up);
    beat_to_systemd();
    let endpoints = etcd.endpoints.join(",");
    let (address, http) =
        advertised(advertise, prepared.cluster_addr(), prepared.http(), &etcd.endpoints)?;
    let http = match prepared.scheme() {
        "http" => http,
        scheme => format!("{scheme}://{http}"),
    };
    let record = Record {
        // Each coordinator is reached at its own address.
        node: address.clone(),
        role: Role::Coordinator,
        incarnation,
        address,
        http,
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: PROTOCOL_VERSION,
        model: pinned.clone().map(Box::new),
        serves: Some(Box::new(prepared.serves(&etcd.cluster))),
    };
    let membership =
        EtcdMembership::start(etcd.clone(), record.clone(), true).map_err(no_thread)?;
    let (view, desires, pulse) = (membership.view(), membership.desires(), membership.pulse());
    actix::spawn(pulse.clone().keep());
    let says = prepared.secrets().map(|secrets| {
        let (serves, says) = (prepared.serves(&etcd.cluster), membership.serves());
        actix::spawn(say_secrets(serves, secrets, etcd.cluster.clone(), says))
    });
    let standby = match Standby::start(&prepared, &view, &pulse) {
        Ok(standby) => standby,
        Err(error) => {
            // Others must not wait for its lease to expire.
            membership.leave().await;
            return Err(error.into());
        }
    };
    print_line(&format!("tutti coordinator: {}", prepared.http().url(prepared.scheme())));
    let mut membership = Some(membership);
    let elected = tokio::select! {
        leader = election(view.clone(), &record) => Ok(Some(leader)),
        () = signals.next() => Ok(None),
        error = other_state(view.clone(), pinned) => Err(error),
        error = etcd::failed(&mut membership) => Err(error),
    };
    // Told to end, it leaves first: a leader that ends at the same time must not count on it.
    if matches!(elected, Ok(None))
        && let Some(membership) = membership.take()
    {
        membership.leave().await;
    }
    standby.stop().await;
    let end = match elected {
        Ok(Some(leader)) => {
            tracing::info!(epoch = leader.epoch, "this coordinator leads");
            let leadership = Leadership {
                view: view.clone(),
                desires,
                pulse,
                publication: None,
                actors: None,
                lora: None,
            };
            // Also told to end, or that another leads, while a slow etcd is waited for.
            let left = tokio::select! {
                left = load(&prepared, leadership, etcd, checkpoints) => left.map(Some),
                () = signals.next() => Ok(None),
                leader = other_leader(view.clone(), incarnation) => Err(superseded(&leader)),
                error = etcd::failed(&mut membership) => Err(error),
            };
            let ends = async |coordinator: &Coordinator| {
                tokio::select! {
                    () = async {
                        signals.next().await;
                        // It leads until the last request that ends with it has ended; otherwise
                        // workers would be told to leave it.
                        let signals = &mut signals;
                        handing_over::end(coordinator, &view, incarnation, patience, signals).await;
                        let own = coordinator.own_requests();
                        let requests = coordinator.requests().saturating_sub(own);
                        if requests > 0 {
                            tracing::info!(requests, "front ends take these to the next leader");
                        }
                    } => Ok(()),
                    leader = other_leader(view.clone(), incarnation) => Err(superseded(&leader)),
                    error = etcd::failed(&mut membership) => Err(error),
                    reason = coordinator.failed() => Err(CliError::Failed(reason.to_owned())),
                }
            };
            let hint = format!("waiting for {degree} workers: tutti worker --etcd {endpoints}");
            match left {
                Ok(Some((leadership, checkpoints))) => {
                    lead(prepared, leadership, checkpoints, &hint, ends).await
                }
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            }
        }
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    if let Some(says) = says {
        says.abort();
    }
    // After the last request: the next leader begins once this one has left.
    if let Some(membership) = membership {
        membership.leave().await;
    }
    if end.is_ok() {
        tracing::info!("the coordinator ends");
    }
    end
}

/// Reads what the leaders before left, the actors and the totals, and what is in the adapters'
/// folders now; saves the totals for the next from now on.
async fn load(
    prepared: &PreparedCoordinator,
    mut leadership: Leadership,
    etcd: EtcdOptions,
    checkpoints: Option<Duration>,
) -> Result<(Leadership, Option<Checkpoints>), CliError> {
    let mut checkpoints = match checkpoints {
        Some(interval) => {
            let (hub, view) = (prepared.hub().clone(), leadership.view.clone());
            let started = Checkpoints::start(hub, view, etcd.clone(), interval);
            Some(started.map_err(|error| {
                CliError::Failed(format!("cannot start the checkpoints' thread: {error}"))
            })?)
        }
        None => None,
    };
    let totals = async {
        if let Some(checkpoints) = &mut checkpoints {
            checkpoints.loaded().await;
        }
    };
    let actors = ActorsLeft::load(etcd, leadership.view.clone());
    let lora = tokio::task::spawn_blocking(prepared.lora_reader());
    let ((), actors, lora) = tokio::join!(totals, actors, lora);
    let lora =
        lora.map_err(|error| CliError::Failed(format!("cannot read the adapters: {error}")))?;
    (leadership.actors, leadership.lora) = (Some(actors), Some(lora));
    leadership.publication = checkpoints.as_ref().map(Checkpoints::publication);
    Ok((leadership, checkpoints))
}

/// Serves until `ends`, then saves the last totals for the next leader.
async fn lead(
    prepared: PreparedCoordinator,
    leadership: Leadership,
    checkpoints: Option<Checkpoints>,
    hint: &str,
    ends: impl AsyncFnOnce(&Coordinator) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let coordinator = Coordinator::serve(prepared, Some(leadership))?;
    print_line(hint);
    let end = ends(&coordinator).await;
    coordinator.stop(false).await;
    if let Some(checkpoints) = checkpoints {
        checkpoints.finish().await;
    }
    end
}

fn superseded(leader: &Leader) -> CliError {
    CliError::Superseded(format!(
        "the coordinator at {} leads now, or has led since this one did (epoch {}); restarted, \
         this one will stand by",
        leader.record.address, leader.epoch
    ))
}

/// Resolves when the cluster serves another state of the model of the hub than this process has
/// found under the same name: its branch has moved between their starts.
async fn other_state(mut view: watch::Receiver<View>, own: Option<PinnedRevision>) -> CliError {
    loop {
        {
            let now = view.borrow_and_update();
            let other = now.pinned().filter(|_| now.own().is_none());
            if let (Some(own), Some(other)) = (&own, other)
                && (&own.name, &own.revision) == (&other.name, &other.revision)
                && own.commit != other.commit
            {
                return CliError::Again(format!(
                    "the cluster serves {} at the commit {}, and this coordinator has found {}; \
                     started again, it takes the cluster's",
                    own.name, other.commit, own.commit
                ));
            }
        }
        if view.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Says in etcd which secrets this process accepts whenever they have changed.
async fn say_secrets(mut serves: Serves, secrets: Keyring, cluster: String, says: ServesSender) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = secrets.fingerprints(&cluster);
        if now != serves.secrets {
            serves.secrets = now;
            says.send_replace(Some(serves.clone()));
        }
    }
}

/// What an operator must know of a coordinator that differs from the leader.
fn warning(leader: &Record, found: &[Difference]) -> String {
    let what = found.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let http = standby::url(&leader.http);
    if found.contains(&Difference::Secret) {
        return format!(
            "this coordinator has {what} than the one that leads, {http}: it will not lead after \
             that one, since workers and front ends could not join it; give both the same secret \
             (--cluster-secret-file), or start this one again when no other leads"
        );
    }
    format!(
        "this coordinator has {what} than the one that leads, {http}: requests are not handed over \
         to it, and whatever it leads will serve that; give both the same options and model, \
         unless this is meant"
    )
}

/// Resolves when this process leads; logs meanwhile who does, and what keeps this one from taking
/// its place.
async fn election(mut view: watch::Receiver<View>, own: &Record) -> Leader {
    let mut said = String::new();
    let mut warned = None;
    loop {
        {
            let now = view.borrow_and_update();
            if let Some(leader) = now.own() {
                return leader.clone();
            }
            let found = now.leader.as_ref().map(|leader| (&leader.record, now.differences(own)));
            match found {
                Some((leader, found)) if !found.is_empty() => {
                    let text = warning(leader, &found);
                    if warned.as_ref() != Some(&text) {
                        tracing::warn!("{text}");
                        warned = Some(text);
                    }
                }
                Some(_) if warned.take().is_some() => {
                    tracing::info!("this coordinator serves the same as the one that leads");
                }
                _ => {}
            }
            let reason = standby::reason(&now);
            // Not what will be over in a moment.
            if now.revision > 0 && now.leader.is_some() && reason != said {
                tracing::info!("{reason}");
                said = reason;
            }
        }
        if view.changed().await.is_err() {
            // The reason is logged elsewhere.
            std::future::pending::<()>().await;
        }
    }
}

/// Resolves when a process other than `incarnation` leads, or has led since. Having no leader, or
/// an unreachable etcd, is no reason to stop.
async fn other_leader(mut view: watch::Receiver<View>, incarnation: u64) -> Leader {
    loop {
        if let Some(leader) = view.borrow_and_update().other_than(incarnation) {
            return leader;
        }
        if view.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_names_the_leader_what_differs_and_the_remedy() {
        let leader = Record {
            node: "h:1".to_owned(),
            role: Role::Coordinator,
            incarnation: 1,
            address: "h:1".to_owned(),
            http: "h:80".to_owned(),
            pid: 1,
            version: String::new(),
            protocol: PROTOCOL_VERSION,
            model: None,
            serves: None,
        };
        let degree = Difference::Option("--tensor-parallel", "2".to_owned(), "1".to_owned());
        let other = warning(&leader, &[Difference::Model, degree.clone()]);
        for part in ["another model, another --tensor-parallel (2, there 1)", "http://h:80"] {
            assert!(other.contains(part), "{other}");
        }
        let secret = warning(&leader, &[Difference::Secret, degree]);
        for part in ["another cluster secret", "http://h:80", "--cluster-secret-file"] {
            assert!(secret.contains(part), "{secret}");
        }
    }
}
