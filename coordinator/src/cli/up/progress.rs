//! The progress bar shown on a terminal while weights load.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar; removed when dropped.
#[derive(Debug)]
pub(super) struct LoadBar {
    bar: ProgressBar,
}

impl LoadBar {
    /// Makes a bar that shows nothing yet.
    pub(super) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes}") {
            bar.set_style(style);
        }
        bar.set_message("loading weights");
        Self { bar }
    }

    /// Shows (bytes done, total bytes).
    pub(super) fn show(&self, (done, total): (u64, u64)) {
        if total > 0 {
            self.bar.set_length(total);
            self.bar.set_position(done);
        }
    }
}

impl Drop for LoadBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
