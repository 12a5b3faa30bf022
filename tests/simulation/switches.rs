//! Guards that can be taken away, to show that the simulation notices.

/// All off: the cluster as it is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Switches {
    /// Workers do nothing when an epoch is aborted.
    pub(crate) ignores_abort: bool,
    /// Workers continue their epoch when the link is lost.
    pub(crate) keeps_epoch_without_link: bool,
    /// Workers keep their KV cache and sequences from epoch to epoch.
    pub(crate) keeps_cache: bool,
    /// Workers run plans of any epoch.
    pub(crate) runs_any_epoch: bool,
    /// Workers queue a report every second, however many are already waiting.
    pub(crate) reports_pile_up: bool,
    /// Waiting for other ranks to connect cannot be aborted.
    pub(crate) connecting_is_not_freed: bool,
    /// The coordinator does not notice silence.
    pub(crate) no_liveness: bool,
    /// A link swaps frames now and then.
    pub(crate) reorder_frames: bool,
    /// A link loses frames now and then.
    pub(crate) lose_frames: bool,
    /// Results of old epochs are delivered as if they were of the present one.
    pub(crate) old_epochs_pass: bool,
    /// Results are delivered twice, the second time as the next step's.
    pub(crate) results_repeat: bool,
    /// Every report counts as one of another process run.
    pub(crate) reports_add_up: bool,
    /// A worker's stale reports count as new.
    pub(crate) stale_reports_count: bool,
    /// Late reports of a process run that is gone count as those of another one.
    pub(crate) gone_process_counts_again: bool,
    /// Time does not pass for replicas without requests.
    pub(crate) no_canary: bool,
    /// A cancellation does not reach requests on their way from one replica to another.
    pub(crate) cancelled_is_forgotten: bool,
    /// A replica is not told that its epoch is over.
    pub(crate) lost_is_not_told: bool,
    /// The cluster is not told that a step failed.
    pub(crate) step_failures_ignored: bool,
    /// Steps may take for ever.
    pub(crate) no_step_timeout: bool,
    /// Steps of which it is known how long they take have no less time than others.
    pub(crate) deadlines_are_not_learned: bool,
    /// A formation may take for ever, and so may an executor that was told to leave its epoch.
    pub(crate) hung_ranks_are_waited_for: bool,
    /// The cluster is told of steps that hang as of steps that fail.
    pub(crate) hung_steps_are_failures: bool,
    /// Replicas have the degree that is wanted, or do not serve.
    pub(crate) degrees_are_fixed: bool,
    /// Time does not pass for the cluster.
    pub(crate) no_cluster_tick: bool,
    /// Clients that leave are not noticed.
    pub(crate) leaving_unnoticed: bool,
    /// Commands of an earlier link run as if they came over the present one.
    pub(crate) old_commands_run: bool,
    /// Nothing checks whether the ranks have the same tokens.
    pub(crate) ranks_may_disagree: bool,
    /// Requests stay where they were taken to.
    pub(crate) queues_are_not_shared: bool,
    /// The cluster is not told of slow ranks.
    pub(crate) slow_ranks_stay: bool,
    /// A process may take the name of another that is still connected.
    pub(crate) newcomers_displace: bool,
    /// A returning worker's old link is not told apart from its new one.
    pub(crate) links_not_told_apart: bool,
    /// The client sees one token less.
    pub(crate) token_lost: bool,
    /// The client sees one token twice.
    pub(crate) token_repeated: bool,
    /// Workers compute every sequence with the adapter of the sequence that they learned last.
    pub(crate) adapters_are_mixed_up: bool,
    /// Workers choose among all tokens, whatever is allowed.
    pub(crate) masks_are_ignored: bool,
    /// Workers take masks of any step and epoch for those that they wait for.
    pub(crate) masks_are_for_anybody: bool,
    /// Masks are not sent if a sequence of the step has ended.
    pub(crate) masks_are_kept_back: bool,
    /// Workers take every token that they sampled behind drafts, right or not.
    pub(crate) drafts_are_believed: bool,
    /// What was computed for a wrong draft stays in the KV cache.
    pub(crate) rejected_drafts_stay: bool,
    /// Of several tokens of a sequence in one answer, the last is lost.
    pub(crate) drafts_are_cut: bool,
    /// Ranks do not learn what rank 0 has drafted, and verify drafts of their own.
    pub(crate) drafts_are_not_told: bool,
    /// Rank 0 does not say how many tokens it has drafted.
    pub(crate) drafted_is_not_told: bool,
    /// What a worker reports about an earlier link's epochs goes over the present link.
    pub(crate) old_words_pass: bool,
    /// Names of collectives are reused: for other epochs, and by other coordinators.
    pub(crate) collectives_share_names: bool,
    /// The next coordinator does not know the totals of the last one.
    pub(crate) totals_are_forgotten: bool,
    /// The next coordinator adds to the totals of workers what they then report again.
    pub(crate) workers_count_twice: bool,
    /// A coordinator goes on although another leads.
    pub(crate) superseded_goes_on: bool,
    /// Workers stay with their coordinator when another leads.
    pub(crate) leader_is_not_followed: bool,
    /// A watch that is cut off from history is waited for.
    pub(crate) compaction_is_ignored: bool,
    /// What a watch does not report is never found in another way.
    pub(crate) never_lists_again: bool,
    /// After etcd was away, any coordinator runs for leader at once.
    pub(crate) anybody_runs: bool,
    /// Any coordinator that thinks it leads writes the totals.
    pub(crate) saves_unfenced: bool,
    /// Every candidate becomes the leader, even where there is one.
    pub(crate) leader_key_is_overwritten: bool,
    /// The last leader is not looked up: a former leader leads again although another led
    /// meanwhile.
    pub(crate) who_led_is_not_known: bool,
    /// The next leader does not know what operators told the last one.
    pub(crate) commands_are_forgotten: bool,
    /// Workers do not copy what comes back from host memory.
    pub(crate) swap_in_is_skipped: bool,
    /// Workers copy what goes to host memory behind a step's writes.
    pub(crate) swap_out_comes_late: bool,
    /// Workers put what comes back from host memory into each other's blocks.
    pub(crate) swap_pairs_are_mixed_up: bool,
    /// Workers keep the states that sequences had before the step.
    pub(crate) states_are_kept_early: bool,
    /// Any coordinator that thinks it leads stores what operators told it.
    pub(crate) commands_stored_unfenced: bool,
    /// A lease that could not be kept is given up, and its keys are not put under the next one.
    pub(crate) leases_are_given_up: bool,
    /// The leader's key stays under the lease that it was written under.
    pub(crate) leads_by_an_old_lease: bool,
    /// The place of an unloaded adapter is freed although requests use it.
    pub(crate) adapters_are_dropped_in_use: bool,
    /// Ranks that have their weights already do not look which adapters a formation lists.
    pub(crate) listed_adapters_are_skipped: bool,
}
