//! LoRA adapters that come and go on a rank.
use kernels::KernelError;
use shared::protocol::{Adapter, Lora};

use super::NOTHING_LOADED;
use super::loaded::LoadedShard;
use crate::device::Device;
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::lora::{Adapters, Piece};
use crate::model::shard::Shard;
use crate::rank::{AdapterReading, AdapterSink};

/// What changes and what it depends on.
type Adapting<'a, B> = (&'a mut B, &'a mut Adapters<B>, &'a ModelConfig, &'a Shard);

/// The adapters of what is loaded, if there is room for any.
pub(super) fn of<D: Device>(
    loaded: Option<&mut LoadedShard<D>>,
) -> Option<Adapting<'_, D::Backend>> {
    loaded?.engine.adapting()
}

/// Reserves a place, and returns what reads the adapter.
///
/// # Errors
/// One sentence.
pub(super) fn open<D: Device>(
    loaded: Option<&mut LoadedShard<D>>,
    adapter: &Adapter,
) -> Result<AdapterReading, String> {
    let Some((_, adapters, config, shard)) = of(loaded) else {
        return Err(NOTHING_LOADED.to_owned());
    };
    let reading = adapters.reserve(adapter, config, shard)?;
    let run = move |sink: &mut dyn AdapterSink| {
        reading.run(|piece| sink.take(piece)).map_err(|error| error.to_string())
    };
    Ok(Box::new(run))
}

/// Puts a piece into its place.
///
/// # Errors
/// [`KernelError`].
pub(super) fn put<D: Device>(
    loaded: Option<&mut LoadedShard<D>>,
    number: u32,
    piece: &Piece,
) -> Result<(), KernelError> {
    let Some((backend, adapters, ..)) = of(loaded) else {
        return Err(KernelError::Shape { op: "put", message: NOTHING_LOADED.to_owned() });
    };
    adapters.put(backend, number, piece)
}

/// Frees the places of adapters that are not listed, and loads those that are missing.
///
/// # Errors
/// [`ModelError`]; the adapter at fault has no place then.
pub(super) fn match_list<D: Device>(
    loaded: Option<&mut LoadedShard<D>>,
    lora: &Lora,
) -> Result<(), ModelError> {
    let Some((backend, adapters, config, shard)) = of(loaded) else { return Ok(()) };
    adapters.retain(lora);
    for adapter in adapters.missing(lora) {
        let reading = adapters.reserve(&adapter, config, shard).map_err(ModelError::Fit)?;
        let mut failed = None;
        let read = reading.run(|piece| match adapters.put(backend, adapter.number, &piece) {
            Ok(()) => true,
            Err(error) => {
                failed = Some(error);
                false
            }
        });
        match (failed, read) {
            (None, Ok(identity)) => adapters.complete(adapter.number, identity),
            (Some(error), _) => {
                adapters.remove(adapter.number);
                return Err(error.into());
            }
            (None, Err(error)) => {
                adapters.remove(adapter.number);
                return Err(error);
            }
        }
    }
    Ok(())
}
