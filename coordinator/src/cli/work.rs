//! `tutti worker`.
use super::{CliError, WorkerArgs};
pub(crate) fn run(_args: &WorkerArgs) -> Result<(), CliError> {
    Err(CliError::Failed("x".into()))
}
