//! `tutti coordinator`.
use super::{CliError, CoordinatorArgs};
pub(crate) fn run(_args: &CoordinatorArgs) -> Result<(), CliError> {
    Err(CliError::Failed("x".into()))
}
