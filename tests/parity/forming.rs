//! Ranks that are formed as a coordinator has them formed, on CPUs and on GPUs, here stand-ins.
use std::net::TcpListener;
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId};
use shared::protocol::{CollectiveSpec, Dtype, EngineConfig, Form, Lora, Quantization};
use testkit::models::variant;
use worker::device::{CpuDevice, CudaDevice};
use worker::engine_rank::EngineRank;
use worker::rank::{AbortSlot, FormNews, Rank as _};

use crate::rig::fake_nccl_options;

/// Brings rank 0's word to rank 1, and ends the epoch while the rank loads, if it is to.
struct News<'a> {
    epoch: Epoch,
    other: &'a AbortSlot,
    ends: Option<&'a AbortSlot>,
}

impl FormNews for News<'_> {
    fn progress(&mut self, _: u64, _: u64) {
        if let Some(own) = self.ends {
            own.abort(self.epoch);
        }
    }

    fn group_id(&mut self, bytes: Vec<u8>) {
        self.other.tell_group_id(self.epoch, bytes);
    }
}

/// What a coordinator of two ranks says.
fn form(rank: u32, epoch: u64) -> Form {
    let name = format!("tutti-forming-{}-{epoch}", std::process::id());
    Form {
        epoch: Epoch(epoch),
        replica: ReplicaId(0),
        rank,
        world_size: 2,
        reduction_ranks: 2,
        dtype: Dtype::Auto,
        quantization: Quantization::None,
        lora: Lora::default(),
        collective: CollectiveSpec::SharedMemory { name },
        collective_timeout_ms: 30_000,
        model: variant("llama-gqa").to_str().unwrap().to_owned(),
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 64,
            max_num_seqs: 4,
            max_num_batched_tokens: 32,
            kv_cache_bytes: 1 << 20,
            swap_bytes: 0,
        },
    }
}

/// A rank as its coordinator forms it: how many seconds it loaded for in two epochs, of which the
/// first ends while it loads.
fn formed(rank: u32, slots: &[AbortSlot; 2]) -> [f64; 2] {
    let device = CudaDevice {
        options: fake_nccl_options(rank),
        memory_utilization: 0.9,
        memory_free: 1 << 32,
        warmup: Duration::ZERO,
        uuid: String::new(),
    };
    let mut engine = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let own = &slots[rank as usize];
    [1, 2].map(|epoch| {
        let form = form(rank, epoch);
        let ends = (epoch == 1).then_some(own);
        let mut news = News { epoch: form.epoch, other: &slots[1], ends };
        let ready = engine.form(&form, own, &mut news).unwrap();
        assert!(ready.weight_bytes > 0 && ready.kv_blocks > 0);
        engine.release();
        own.clear();
        assert_eq!(engine.lost_device(), None);
        ready.load_seconds
    })
}

/// What was loaded is good for the next epoch, though the one it was loaded in ended meanwhile.
#[test]
fn a_load_outlives_its_epoch() {
    let slots = [AbortSlot::default(), AbortSlot::default()];
    let seconds = std::thread::scope(|scope| {
        let slots = &slots;
        let threads = [0, 1].map(|rank| scope.spawn(move || formed(rank, slots)));
        threads.map(|thread| thread.join().unwrap())
    });
    for [first, second] in seconds {
        assert!(first > 0.0 && second == 0.0, "{first} {second}");
    }
}

/// Weights stay while their files do, whatever else becomes of these: not when others take their place.
#[test]
fn a_folder_that_was_replaced_is_loaded_anew() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(variant("llama-gqa").join(name), model.join(name)).unwrap();
    }
    let device = CpuDevice { threads: 1 };
    let mut engine = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let (own, other) = (AbortSlot::default(), AbortSlot::default());
    let mut epoch = 0;
    let mut form = || {
        epoch += 1;
        let form = Form {
            epoch: Epoch(epoch),
            world_size: 1,
            reduction_ranks: 1,
            collective: CollectiveSpec::None,
            model: model.to_str().unwrap().to_owned(),
            ..form(0, epoch)
        };
        let ready =
            engine.form(&form, &own, &mut News { epoch: form.epoch, other: &other, ends: None });
        engine.release();
        own.clear();
        ready.map(|ready| (ready.load_seconds > 0.0, ready.identity))
    };
    let (loaded, first) = form().unwrap();
    assert!(loaded);
    assert_eq!(form().unwrap(), (false, first), "the same again");
    // Touched, and not changed.
    let file = model.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(form().unwrap(), (false, first));
    // Gone: what is loaded needs it no more.
    std::fs::remove_file(&file).unwrap();
    assert_eq!(form().unwrap(), (false, first));
    // Another one of the same form: a bit in the middle of every kilobyte.
    let mut others = whole.clone();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    others[header..].iter_mut().skip(2).step_by(256).for_each(|byte| *byte ^= 1);
    std::fs::write(&file, &others).unwrap();
    let (loaded, second) = form().unwrap();
    assert!(loaded && second != first);
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(form().unwrap(), (true, first));
}
