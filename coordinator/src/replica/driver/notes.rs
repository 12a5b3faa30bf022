//! Notes on what happens to requests that are traced: for the process that answers their clients.
use shared::protocol::{NOTES_MAX, RequestNote};

use super::LiveRequest;
use crate::engine::EngineEvent;

/// What was noted of a request that is traced.
#[derive(Debug, Default)]
pub(super) struct Notes {
    sent: u16,
    /// Tokens drafted, and how many of them were accepted.
    drafted: (u64, u64),
}

impl Notes {
    /// Starts to note, for a request that is `traced`.
    pub(super) fn of(traced: bool) -> Option<Self> {
        traced.then(Self::default)
    }
}

impl LiveRequest {
    /// Sends a note, unless there were too many or nobody asks for them.
    pub(super) fn note(&mut self, note: RequestNote) {
        let Some(notes) = self.notes.as_mut().filter(|notes| notes.sent < NOTES_MAX - 1) else {
            return;
        };
        notes.sent += 1;
        self.send_note(note);
    }

    /// Counts drafts that were verified.
    pub(super) fn drafted(&mut self, tokens: u32, accepted: u32) {
        if let Some(notes) = &mut self.notes {
            notes.drafted.0 += u64::from(tokens);
            notes.drafted.1 += u64::from(accepted);
        }
    }

    /// Sends what is known only at the request's end; call it before the end itself is sent.
    pub(super) fn note_end(&mut self) {
        if let Some(Notes { drafted: (tokens, accepted), .. }) = self.notes.take()
            && tokens > 0
        {
            self.send_note(RequestNote::Drafted { tokens, accepted });
        }
    }

    fn send_note(&mut self, note: RequestNote) {
        // Who does not take it is found when a token comes: a note is not worth more.
        if self.events.send(EngineEvent::Note(note)).is_ok() {
            self.reading.sent();
        }
    }
}
