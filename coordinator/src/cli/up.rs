//! `tutti up`.
use super::{CliError, UpArgs};
pub(crate) fn run(_args: &UpArgs) -> Result<(), CliError> {
    Err(CliError::Failed("x".into()))
}
