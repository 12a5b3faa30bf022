//! What tests and tools look at.
use super::{Choices, Tensors};
use crate::error::KernelError;

/// Copies to the host of what the step path leaves on the device: for tests and tools.
pub trait Inspect: Tensors {
    /// Copies a buffer's rows to the host: for tests and tools, not for the step path.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn read_buffer(&mut self, buffer: &Self::Buffer) -> Result<Vec<f32>, KernelError>;

    /// Copies what rows chose to the host: for tests and tools, not for the step path.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`], [`KernelError::Device`].
    fn read_routes(&mut self, routes: &Self::Routes) -> Result<Choices, KernelError>;
}
