//! Access to device contents for tests and tools.
use super::{Choices, Tensors};
use crate::error::KernelError;

/// Copies to the host of data that steps leave on the device, for tests and tools.
pub trait Inspect: Tensors {
    /// Copies a buffer's rows to the host. Not for use in steps.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn read_buffer(&mut self, buffer: &Self::Buffer) -> Result<Vec<f32>, KernelError>;

    /// Copies the routing of rows to the host. Not for use in steps.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`], [`KernelError::Device`].
    fn read_routes(&mut self, routes: &Self::Routes) -> Result<Choices, KernelError>;
}
