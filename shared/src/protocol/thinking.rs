//! A bound on how much a model reasons before it answers.
use serde::{Deserialize, Serialize};

/// Maximum number of [`ThinkingBudget::closes`].
pub const CLOSES_MAX: usize = 8;

/// A bound on the reasoning of each choice. Once it is spent, the next token is the one that ends
/// the reasoning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThinkingBudget {
    /// Maximum number of tokens of reasoning, without the marks around it.
    pub tokens: u32,
    /// The token that opens reasoning, if there is one.
    pub open: Option<u32>,
    /// The tokens that end it; the first of them is the one that is forced.
    pub closes: Vec<u32>,
    /// Whether the prompt has opened it.
    pub is_open: bool,
}

impl ThinkingBudget {
    /// Checks the tokens against a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// One sentence that continues after what it is about.
    pub fn check(&self, vocab: u32) -> Result<(), String> {
        let count = self.closes.len();
        if !(1..=CLOSES_MAX).contains(&count) {
            return Err(format!("has {count} tokens that end it, it must have 1 to {CLOSES_MAX}"));
        }
        match self.open.iter().chain(&self.closes).find(|token| **token >= vocab) {
            Some(token) => {
                Err(format!("names token {token}, which is not below the vocabulary's {vocab}"))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_few_and_of_the_vocabulary() {
        let budget = ThinkingBudget { tokens: 0, open: Some(3), closes: vec![4], is_open: false };
        assert_eq!(budget.check(5), Ok(()));
        for (wrong, what) in [
            (ThinkingBudget { closes: vec![], ..budget.clone() }, "has 0 tokens"),
            (ThinkingBudget { closes: vec![4; 9], ..budget.clone() }, "has 9 tokens"),
            (ThinkingBudget { closes: vec![4, 5], ..budget.clone() }, "token 5"),
            (ThinkingBudget { open: Some(7), ..budget }, "token 7"),
        ] {
            let said = wrong.check(5).unwrap_err();
            assert!(said.contains(what), "{said}");
        }
    }
}
