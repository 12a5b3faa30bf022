//! Which groups of a panel are converted together.
use std::ops::Range;

use super::super::super::pack::{Int4Group, Int4Panel};

/// Some groups of a panel, or a part of one of its groups.
pub(super) struct Block<'a> {
    pub(super) panel: Int4Panel<'a>,
    groups: Range<usize>,
    /// Range of rows of words taken from each group, as far as the group has them.
    rows: Range<usize>,
}

/// The part of a group that a block takes.
pub(super) struct Piece<'a> {
    /// The group, restricted to the rows of words taken.
    pub(super) group: Int4Group<'a>,
    /// Index of its first row within the panel.
    pub(super) first_row: usize,
    /// The group is the panel's first.
    pub(super) is_first: bool,
    /// The piece begins with its group.
    pub(super) begins: bool,
    /// The piece ends with its group.
    pub(super) ends: bool,
}

impl<'a> Block<'a> {
    /// The blocks of a panel, of at most `most` rows of words.
    pub(super) fn all(panel: Int4Panel<'a>, most: usize) -> impl Iterator<Item = Self> {
        let len = move |group: usize| panel.group(group).rows.len();
        let (mut group, mut row) = (0, 0);
        std::iter::from_fn(move || {
            let first = group;
            if first == panel.num_groups() {
                return None;
            }
            if len(first) > most {
                let rows = row..(row + most).min(len(first));
                (group, row) = match rows.end < len(first) {
                    true => (first, rows.end),
                    false => (first + 1, 0),
                };
                return Some(Self { panel, groups: first..first + 1, rows });
            }
            let mut left = most;
            while group < panel.num_groups() && len(group) <= left {
                left -= len(group);
                group += 1;
            }
            Some(Self { panel, groups: first..group, rows: 0..most })
        })
    }

    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece<'a>> {
        let (panel, rows) = (self.panel, self.rows.clone());
        self.groups.clone().map(move |index| {
            let group = panel.group(index);
            let (all, end) = (group.rows, rows.end.min(group.rows.len()));
            Piece {
                group: Int4Group { rows: &all[rows.start..end], ..group },
                first_row: group.first_pair / 4 + rows.start,
                is_first: index == 0,
                begins: rows.start == 0,
                ends: end == all.len(),
            }
        })
    }

    pub(super) fn begins_panel(&self) -> bool {
        self.groups.start == 0 && self.rows.start == 0
    }

    pub(super) fn ends_panel(&self) -> bool {
        let groups = self.panel.num_groups();
        self.groups.end == groups && self.panel.group(groups - 1).rows.len() <= self.rows.end
    }
}
