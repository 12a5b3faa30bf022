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
    /// A label that takes any value; the merger bounds their number.
    #[must_use]
    pub const fn open(name: &'static str) -> Self {
        Self { name, values: &[] }
    }

    /// Whether `value` is legal.
    #[must_use]
    pub fn allows(&self, value: &str) -> bool {
        value.len() <= MAX_LABEL_VALUE_BYTES
            && (self.values.is_empty() || self.values.contains(&value))
    }
}

/// Maximum length of a label value, in bytes.
pub const MAX_LABEL_VALUE_BYTES: usize = 128;

/// Index of the replica.
pub const REPLICA: Label = Label::open("replica");
/// Rank within the replica, 0-based.
pub const RANK: Label = Label::open("rank");
/// Algorithm with which ranks exchange data, by the program's own name for it.
pub const ALGORITHM: Label = Label::open("algorithm");
/// The worker's slot, stable across its restarts.
pub const WORKER: Label = Label::open(WORKER_NAME);
/// The pattern of an HTTP route, not the requested path.
pub const ROUTE: Label = Label::open("route");
/// The HTTP status code.
pub const STATUS: Label = Label::open("status");
/// The program's version.
pub const VERSION: Label = Label::open("version");
/// Tokens per KV block.
pub const BLOCK_SIZE: Label = Label::open("block_size");
/// Data type of the KV cache, as configured (`--kv-cache-dtype`, or `--dtype` if that is `auto`).
pub const CACHE_DTYPE: Label = Label::open("cache_dtype");
/// Whether prefixes of prompts are looked up in the KV cache.
pub const ENABLE_PREFIX_CACHING: Label =
    Label { name: "enable_prefix_caching", values: &["true", "false"] };
/// KV blocks that a replica has in host memory.
pub const NUM_HOST_BLOCKS: Label = Label::open("num_host_blocks");
/// Blocks of a replica's KV cache.
pub const NUM_BLOCKS: Label = Label::open("num_blocks");
/// Maximum length of a sequence, in tokens.
pub const MAX_MODEL_LEN: Label = Label::open("max_model_len");
/// Maximum number of sequences in one step.
pub const MAX_NUM_SEQS: Label = Label::open("max_num_seqs");
/// Maximum number of tokens computed in one step.
pub const MAX_NUM_BATCHED_TOKENS: Label = Label::open("max_num_batched_tokens");
/// Position in a draft, from 0.
pub const POSITION: Label = Label::open("position");
/// Number of ranks of the replica.
pub const TENSOR_PARALLEL: Label = Label::open("tensor_parallel");

/// The front end's slot, stable across its restarts.
pub const FRONTEND: Label = Label::open(FRONTEND_NAME);
/// Name of a node, which is one process of the cluster.
pub const NODE: Label = Label::open("node");
/// A process of the cluster: `coordinator`, `worker-0`, `frontend-0`.
pub const PROCESS: Label = Label::open(PROCESS_NAME);
/// Name of a machine.
pub const HOST: Label = Label::open("host");
/// Index of a GPU on its host.
pub const GPU: Label = Label::open("gpu");
/// The product name of a device.
pub const NAME: Label = Label::open("name");
/// UUID of a device.
pub const UUID: Label = Label::open("uuid");
/// A LoRA adapter.
pub const ADAPTER: Label = Label::open("adapter");
/// The served model's name; see [`super::Definition::model`].
pub const MODEL_NAME: &str = "model_name";

pub(super) const FRONTEND_NAME: &str = "frontend";
pub(super) const PROCESS_NAME: &str = "process";
pub(super) const WORKER_NAME: &str = "worker";

/// The value of [`REPLICA`] for requests that no replica holds yet.
pub const NO_REPLICA: &str = "none";

/// A closed set of label values.
pub trait LabelValue: Copy + Sized + 'static {
    /// The label that takes these values.
    const LABEL: Label;

    /// Every value, in the order of [`LabelValue::position`].
    const ALL: &'static [Self];

    /// Returns the published value.
    fn as_str(self) -> &'static str;

    /// Returns the position in [`LabelValue::ALL`].
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
        /// The server gave up on it.
        Error = "error",
        /// The next coordinator goes on with it, and accepts it anew.
        HandedOver = "handed_over",
        /// The token limit was reached.
        Length = "length",
        /// An end token or a stop string was reached.
        Stop = "stop",
    }
}

label_enum! {
    /// Why a request was not taken.
    RejectReason, "reason" {
        /// It is not valid.
        Invalid = "invalid",
        /// A front end is at one of its bounds: waiting texts, large bodies, grammars.
        Overloaded = "overloaded",
        /// Its API key has reached its limit.
        KeyLimit = "key_limit",
        /// The bounded queue is full.
        QueueFull = "queue_full",
        /// The server is shutting down.
        ShuttingDown = "shutting_down",
        /// It can never fit: into the KV cache, the model's context or the bound on bodies.
        TooLarge = "too_large",
        /// Credentials are missing or wrong.
        Unauthorized = "unauthorized",
        /// No replica can serve.
        Unavailable = "unavailable",
    }
}

label_enum! {
    /// Why a request expired.
    ExpiryReason, "reason" {
        /// The client's own deadline has passed.
        Deadline = "deadline",
        /// It waited too long for its first step.
        QueueWait = "queue_wait",
        /// It had begun when its coordinator was lost, and no other one went on with it.
        NoCoordinator = "no_coordinator",
    }
}

label_enum! {
    /// Why a serving replica broke.
    FailoverReason, "reason" {
        /// The coordinator's actor for it ended.
        ActorFailed = "actor_failed",
        /// A rank reported that it cannot go on: a device's error, or a collective's.
        RankFailed = "rank_failed",
        /// A rank's worker is gone, or its link takes no more.
        RankLost = "rank_lost",
        /// A rank left unanswered what it was told.
        RankSilent = "rank_silent",
        /// Ranks computed different tokens in the same step.
        RanksDisagree = "ranks_disagree",
        /// A step took too long, or a rank waited in it for another in vain.
        StepOverdue = "step_overdue",
        /// A rank answered a step that it was not sent, or left one out.
        WrongStep = "wrong_step",
    }
}

label_enum! {
    /// Why a result of a step had no effect.
    FencedReason, "reason" {
        /// Its worker has no rank in the epoch, or in any.
        NoRank = "no_rank",
        /// Its rank had answered the step before.
        Repeated = "repeated",
        /// Its epoch is over, or its end is decided.
        StaleEpoch = "stale_epoch",
    }
}

label_enum! {
    /// Files with secrets that are read again when they change.
    SecretFile, "file" {
        /// API keys.
        ApiKeys = "api_keys",
        /// The server's certificate and key, and the authorities for clients.
        Tls = "tls",
    }
}

label_enum! {
    /// Why spans of traces were dropped.
    SpanLoss, "reason" {
        /// The queue for the collector is full.
        QueueFull = "queue_full",
        /// The collector does not take them.
        Refused = "refused",
        /// The collector did not answer, or was busy for too long.
        Unreachable = "unreachable",
    }
}

label_enum! {
    /// Outcome of reading a changed file again.
    ReloadOutcome, "outcome" {
        /// It cannot be used: the previous content stays in use.
        Failed = "failed",
        /// It is in use.
        Ok = "ok",
    }
}

label_enum! {
    /// What constrains a request's output.
    GuideKind, "kind" {
        /// Nothing but words that must not be generated.
        BadWords = "bad_words",
        /// A list of strings.
        Choice = "choice",
        /// A grammar.
        Grammar = "grammar",
        /// A JSON schema, including the schema of any object.
        Json = "json",
        /// A regular expression.
        Regex = "regex",
        /// Nothing but a bound on its reasoning, perhaps beside bad words.
        Thinking = "thinking",
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
    /// Why a message to a named actor had no effect, or its sender got no reply.
    MessageRefusal, "reason" {
        /// No reply came in time.
        Deadline = "deadline",
        /// The actor failed while handling it.
        Failed = "failed",
        /// A link on the path broke or did not accept it.
        LinkLost = "link_lost",
        /// The actor does not keep up: its mailbox is full.
        MailboxFull = "mailbox_full",
        /// The actor takes other messages.
        Malformed = "malformed",
        /// No actor has the name.
        NoSuchActor = "no_such_actor",
        /// It does not fit into a frame.
        TooLarge = "too_large",
        /// Too many asks were under way.
        TooManyAsks = "too_many_asks",
        /// It is about to be started, or the coordinator could not be reached.
        Unavailable = "unavailable",
    }
}

label_enum! {
    /// Direction in which KV blocks are copied between the KV cache and host memory.
    SwapDirection, "direction" {
        /// To the KV cache.
        In = "in",
        /// To host memory.
        Out = "out",
    }
}

label_enum! {
    /// State of an actor.
    ActorState, "state" {
        /// Serving.
        Alive = "alive",
        /// Gone for good.
        Dead = "dead",
        /// Finishing what it holds, accepting nothing new.
        Draining = "draining",
        /// Not placed yet.
        Pending = "pending",
        /// Waiting to be started again.
        Restarting = "restarting",
        /// Starting.
        Starting = "starting",
    }
}

label_enum! {
    /// Role of a registered process.
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
        /// One of its application metrics is not legal, or is declared differently elsewhere, or
        /// its name clashes with another one's; the rest of the report was merged.
        Application = "application",
        /// Bucket counts do not fit the declared bounds.
        BucketMismatch = "bucket_mismatch",
        /// It has series that our catalogue lacks or declares differently; only those are left out.
        CatalogueMismatch = "catalogue_mismatch",
        /// It has more label sets than allowed; the rest of the report was merged.
        LabelCardinality = "label_cardinality",
        /// It cannot be decoded, or is not in canonical order.
        Malformed = "malformed",
        /// A value is not a finite number.
        NotFinite = "not_finite",
        /// It holds a series that this source does not own.
        NotOwner = "not_owner",
        /// It arrived after its incarnation was retired.
        Retired = "retired",
        /// A total is lower than reported before.
        TotalFell = "total_fell",
        /// A label value is not among the declared ones.
        UnknownLabel = "unknown_label",
        /// It contains a series that does not exist, or that has another kind.
        UnknownSeries = "unknown_series",
    }
}

label_enum! {
    /// Why a connection of a worker or front end was refused.
    HandshakeRefusal, "reason" {
        /// It may not join, or not now: its name is taken, its totals are closed, or what it
        /// declares is not legal.
        Admission = "admission",
        /// It has another cluster secret, or none, or has one although the cluster has none.
        Authentication = "authentication",
        /// Too many connections from its address are half open.
        Crowded = "crowded",
        /// It closed the connection, or the connection broke.
        Gone = "gone",
        /// Its first message is not a valid hello.
        Malformed = "malformed",
        /// It sent nothing, or did not read the answer, in time.
        Silent = "silent",
        /// It has another protocol version.
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
        /// It sent something that is not a valid frame, or more than is accepted.
        Malformed = "malformed",
        /// It did not read its frames.
        QueueFull = "queue_full",
        /// Nothing was received from it.
        Silent = "silent",
    }
}

label_enum! {
    /// Why a process refused to record something.
    ObservationRefusal, "reason" {
        /// Not a finite number, or negative where it must not be.
        InvalidValue = "invalid_value",
        /// The metrics of the process's application make its report too large; the report is made
        /// without them.
        TooLarge = "too_large",
        /// A label value outside its declared set.
        UnknownLabel = "unknown_label",
    }
}
