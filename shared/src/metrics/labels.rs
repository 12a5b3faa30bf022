//! Label names, and enums for labels whose values form a closed set.
//!
//! Identifiers of requests, processes or connections are never labels: every set here is small.

/// A label of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The published name.
    pub name: &'static str,
    /// All legal values; empty when any value is legal.
    pub values: &'static [&'static str],
}

impl Label {
    /// A label with any value, bounded in number by the merger.
    #[must_use]
    pub const fn open(name: &'static str) -> Self {
        Self { name, values: &[] }
    }

    /// True when `value` may be used.
    #[must_use]
    pub fn allows(&self, value: &str) -> bool {
        value.len() <= MAX_LABEL_VALUE_BYTES
            && (self.values.is_empty() || self.values.contains(&value))
    }
}

/// Longest label value, in bytes.
pub const MAX_LABEL_VALUE_BYTES: usize = 128;

/// Index of the replica.
pub const REPLICA: Label = Label::open("replica");
/// Rank within the replica, 0-based.
pub const RANK: Label = Label::open(RANK_NAME);
/// How ranks exchange data: a name of the program's own.
pub const ALGORITHM: Label = Label::open("algorithm");
/// The worker's slot, stable over its restarts.
pub const WORKER: Label = Label::open(WORKER_NAME);
/// The pattern of an HTTP route, not the requested path.
pub const ROUTE: Label = Label::open("route");
/// The HTTP status code.
pub const STATUS: Label = Label::open("status");
/// The program's version.
pub const VERSION: Label = Label::open("version");
/// Tokens per KV block.
pub const BLOCK_SIZE: Label = Label::open("block_size");
/// What is said of the numbers of KV caches (`--dtype`).
pub const CACHE_DTYPE: Label = Label::open("cache_dtype");
/// Whether prefixes of prompts are looked up in the KV cache.
pub const ENABLE_PREFIX_CACHING: Label =
    Label { name: "enable_prefix_caching", values: &["true", "false"] };
/// Blocks that a replica has in host memory.
pub const NUM_HOST_BLOCKS: Label = Label::open("num_host_blocks");
/// Blocks of a replica's KV cache.
pub const NUM_BLOCKS: Label = Label::open("num_blocks");
/// Longest sequence in tokens.
pub const MAX_MODEL_LEN: Label = Label::open("max_model_len");
/// Most sequences in one step.
pub const MAX_NUM_SEQS: Label = Label::open("max_num_seqs");
/// Most tokens computed in one step.
pub const MAX_NUM_BATCHED_TOKENS: Label = Label::open("max_num_batched_tokens");
/// Place in a draft, from 0.
pub const POSITION: Label = Label::open("position");
/// Ranks of the replica.
pub const TENSOR_PARALLEL: Label = Label::open("tensor_parallel");

/// A front end's slot, stable over its restarts.
pub const FRONTEND: Label = Label::open(FRONTEND_NAME);
/// A node's name: one process that is part of the cluster.
pub const NODE: Label = Label::open("node");
/// A process of the cluster: `coordinator`, `worker-0`, `frontend-0`.
pub const PROCESS: Label = Label::open(PROCESS_NAME);
/// A machine's name.
pub const HOST: Label = Label::open("host");
/// Index of a GPU on its host.
pub const GPU: Label = Label::open("gpu");
/// The product name of a device.
pub const NAME: Label = Label::open("name");
/// A device's own identity.
pub const UUID: Label = Label::open("uuid");
/// A LoRA adapter.
pub const ADAPTER: Label = Label::open("adapter");
/// The served model's name: see [`super::Definition::model`].
pub const MODEL_NAME: &str = "model_name";

pub(super) const FRONTEND_NAME: &str = "frontend";
pub(super) const PROCESS_NAME: &str = "process";
pub(super) const RANK_NAME: &str = "rank";
pub(super) const WORKER_NAME: &str = "worker";

/// The value of [`REPLICA`] for requests that no replica holds yet.
pub const NO_REPLICA: &str = "none";

/// A closed set of label values.
pub trait LabelValue: Copy + Sized + 'static {
    /// The label that takes these values.
    const LABEL: Label;

    /// Every value, in the order of [`LabelValue::position`].
    const ALL: &'static [Self];

    /// As published.
    fn as_str(self) -> &'static str;

    /// Position in [`LabelValue::ALL`].
    fn position(self) -> usize;
}

macro_rules! label_enum {
    ($(#[$doc:meta])* $name:ident, $label:literal {
        $($(#[$variant_doc:meta])* $variant:ident = $value:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl LabelValue for $name {
            const LABEL: Label = Label { name: $label, values: &[$($value),*] };
            const ALL: &'static [Self] = &[$(Self::$variant),*];

            fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $value,)*
                }
            }

            fn position(self) -> usize {
                self as usize
            }
        }
    };
}

label_enum! {
    /// Why a request ended.
    FinishedReason, "finished_reason" {
        /// The client left or cancelled.
        Abort = "abort",
        /// The server gave it up.
        Error = "error",
        /// The next coordinator goes on with it, and accepts it anew.
        HandedOver = "handed_over",
        /// The token limit was reached.
        Length = "length",
        /// An end token or a stop string.
        Stop = "stop",
    }
}

label_enum! {
    /// Why a request was not taken.
    RejectReason, "reason" {
        /// It is not valid.
        Invalid = "invalid",
        /// A front end is at one of its bounds: of texts that wait, of large bodies, of grammars.
        Overloaded = "overloaded",
        /// Its API key has as many as it may have.
        KeyLimit = "key_limit",
        /// The bounded queue is full.
        QueueFull = "queue_full",
        /// The server is shutting down.
        ShuttingDown = "shutting_down",
        /// It can never fit: into the KV cache, the model's context or the bound of bodies.
        TooLarge = "too_large",
        /// Credentials are missing or wrong.
        Unauthorized = "unauthorized",
        /// No replica can serve.
        Unavailable = "unavailable",
    }
}

label_enum! {
    /// Why a request's time was over.
    ExpiryReason, "reason" {
        /// The client's own bound has passed.
        Deadline = "deadline",
        /// It has waited for its first step for too long.
        QueueWait = "queue_wait",
    }
}

label_enum! {
    /// Files with secrets that are read again when they change.
    SecretFile, "file" {
        /// API keys.
        ApiKeys = "api_keys",
        /// The server's certificate and its key, and authorities of clients.
        Tls = "tls",
    }
}

label_enum! {
    /// What became of a file that was read again.
    ReloadOutcome, "outcome" {
        /// It cannot be used: what was read before stays in use.
        Failed = "failed",
        /// It is in use.
        Ok = "ok",
    }
}

label_enum! {
    /// What says what a request's output must be.
    GuideKind, "kind" {
        /// A list of strings.
        Choice = "choice",
        /// A grammar.
        Grammar = "grammar",
        /// A JSON schema, that of any object too.
        Json = "json",
        /// A regular expression.
        Regex = "regex",
        /// A list of tokens.
        Tokens = "tokens",
    }
}

label_enum! {
    /// What a waiting request waits for.
    WaitingReason, "reason" {
        /// Room in the batch or in the KV cache of its replica.
        Capacity = "capacity",
        /// A replica that can serve.
        NoReplica = "no_replica",
        /// Room, after it was preempted.
        Preempted = "preempted",
    }
}

label_enum! {
    /// Where a prompt token's keys and values came from.
    PromptSource, "source" {
        /// The prefix cache.
        LocalCacheHit = "local_cache_hit",
        /// Computed.
        LocalCompute = "local_compute",
    }
}

label_enum! {
    /// Why a message to a named actor had no effect, or its sender no reply.
    MessageRefusal, "reason" {
        /// No reply in time.
        Deadline = "deadline",
        /// The actor failed over it.
        Failed = "failed",
        /// A link on the way broke, or did not take it.
        LinkLost = "link_lost",
        /// The actor does not keep up.
        MailboxFull = "mailbox_full",
        /// The actor takes other messages.
        Malformed = "malformed",
        /// Nobody has the name.
        NoSuchActor = "no_such_actor",
        /// It does not fit into a frame.
        TooLarge = "too_large",
        /// Too many asks were under way.
        TooManyAsks = "too_many_asks",
    }
}

label_enum! {
    /// Which way KV blocks go between the KV cache and host memory.
    SwapDirection, "direction" {
        /// To the KV cache.
        In = "in",
        /// To host memory.
        Out = "out",
    }
}

label_enum! {
    /// Where an actor is in its life.
    ActorState, "state" {
        /// Serving.
        Alive = "alive",
        /// Gone for good.
        Dead = "dead",
        /// Finishing what it holds, taking nothing new.
        Draining = "draining",
        /// Not placed yet.
        Pending = "pending",
        /// Waiting to be started again.
        Restarting = "restarting",
        /// Coming up.
        Starting = "starting",
    }
}

label_enum! {
    /// What a registered process is.
    MemberRole, "role" {
        /// Schedules, or stands by.
        Coordinator = "coordinator",
        /// Serves HTTP for a coordinator.
        Frontend = "frontend",
        /// Computes.
        Worker = "worker",
    }
}

label_enum! {
    /// An HTTP method.
    Method, "method" {
        /// DELETE.
        Delete = "DELETE",
        /// GET.
        Get = "GET",
        /// HEAD.
        Head = "HEAD",
        /// OPTIONS.
        Options = "OPTIONS",
        /// POST.
        Post = "POST",
        /// PUT.
        Put = "PUT",
        /// Any other.
        Other = "other",
    }
}

label_enum! {
    /// Why a source's report was refused.
    ReportRefusal, "reason" {
        /// An application metric of it is not legal, or is declared otherwise elsewhere; the rest
        /// of the report was taken.
        Application = "application",
        /// Bucket counts do not fit the declared bounds.
        BucketMismatch = "bucket_mismatch",
        /// It has series that our catalogue has not, or not alike; they alone are left out.
        CatalogueMismatch = "catalogue_mismatch",
        /// It brings more label sets than allowed; the rest of the report was taken.
        LabelCardinality = "label_cardinality",
        /// It cannot be decoded, or is not in canonical order.
        Malformed = "malformed",
        /// A value is not a finite number.
        NotFinite = "not_finite",
        /// It holds a series that this source does not own.
        NotOwner = "not_owner",
        /// It came after its incarnation was retired.
        Retired = "retired",
        /// A total is lower than reported before.
        TotalFell = "total_fell",
        /// A label value is not one of the declared ones.
        UnknownLabel = "unknown_label",
        /// It holds a series that does not exist, or exists with another kind.
        UnknownSeries = "unknown_series",
    }
}

label_enum! {
    /// Why a connection of a worker or front end was not taken.
    HandshakeRefusal, "reason" {
        /// It may not join, or not now: its name is taken, its totals are closed, what it says of
        /// itself is not legal.
        Admission = "admission",
        /// It has another cluster secret, or none, or one where there is none.
        Authentication = "authentication",
        /// Too many connections of its address are half open.
        Crowded = "crowded",
        /// It closed the connection, or the connection broke.
        Gone = "gone",
        /// What it said is no hello of ours.
        Malformed = "malformed",
        /// It said nothing, or did not take the answer, in time.
        Silent = "silent",
        /// It is of another protocol version.
        Version = "version",
    }
}

label_enum! {
    /// How the link of a worker or front end ended.
    LinkEnd, "reason" {
        /// The connection broke.
        Broken = "broken",
        /// The other end closed it, or its process ended.
        Closed = "closed",
        /// This side closed it.
        Local = "local",
        /// It sent what is no frame of ours, or more than is taken.
        Malformed = "malformed",
        /// It did not take its frames.
        QueueFull = "queue_full",
        /// Nothing was heard of it.
        Silent = "silent",
    }
}

label_enum! {
    /// Why a process refused to record something.
    ObservationRefusal, "reason" {
        /// Not a finite number, or negative where it must not be.
        InvalidValue = "invalid_value",
        /// A label value outside its declared set.
        UnknownLabel = "unknown_label",
    }
}
