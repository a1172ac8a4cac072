//! The weights of a model by the names that its family gives them, whatever the names and parts in which they are stored.

use std::{cell::RefCell, collections::BTreeSet};

use super::{
    fold::Factors,
    rows::{Rows, push},
};
use crate::{
    Error, Result,
    blocks::{Plan, moe::Experts},
    checkpoint::{Checkpoint, Run, StoredTensor},
    gguf::{Change, Part},
    models::Architecture,
};

/// Names of the output matrix, below each prefix or alone.
const HEADS: [&str; 3] = ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"];

/// The weights that a model uses.
pub(super) struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    architecture: &'a Architecture,
    factors: Factors,
    /// Names of stored tensors that the model uses.
    used: BTreeSet<String>,
    /// Those that were found.
    found: RefCell<BTreeSet<String>>,
}

/// Stored tensors of a weight: the same number for each of its outermost entries, their rows one after the other.
struct Stored {
    shape: Vec<usize>,
    names: Vec<Vec<String>>,
}

impl<'a> Weights<'a> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        architecture: &'a Architecture,
        factors: Factors,
        used: BTreeSet<String>,
    ) -> Self {
        Self { checkpoint, architecture, factors, used, found: RefCell::default() }
    }

    /// A name below the model's prefix.
    fn relative<'n>(&self, name: &'n str) -> &'n str {
        self.architecture.prefixes.iter().find_map(|p| name.strip_prefix(p)).unwrap_or(name)
    }

    /// The stored tensor of a name.
    fn one(&self, name: &str) -> Option<&String> {
        let a = self.architecture;
        let below = self.relative(name);
        let mut names = vec![name.to_owned()];
        let others: &[&str] = if a.embedding.contains(&below) { a.embedding } else { &[below] };
        for prefix in a.prefixes {
            names.extend(others.iter().map(|other| format!("{prefix}{other}")));
        }
        if name == HEADS[0] || a.tied && a.embedding.contains(&below) {
            names.extend(HEADS.map(str::to_owned));
        }
        names.iter().find_map(|name| self.used.get(name))
    }

    /// The stored tensors of a weight; none if there is no such weight.
    fn stored(&self, name: &str) -> Option<Stored> {
        let shape = |name: &str| self.checkpoint.info(name).map(|info| squeezed(&info.shape));
        if let Some(one) = self.one(name) {
            return Some(Stored { shape: shape(one)?, names: vec![vec![one.clone()]] });
        }
        let (prefix, experts, count) = self.experts(self.relative(name))?;
        // Stacked tensors are no layers of their own, so that some files leave out the suffix.
        let stacked = ["", ".weight"].map(|suffix| format!("{prefix}{}{suffix}", experts.stacked));
        if let Some(one) = stacked.iter().find_map(|name| self.one(name)) {
            return Some(Stored { shape: shape(one)?, names: vec![vec![one.clone()]] });
        }
        let of = |e: usize, leaf: &str| self.one(&format!("{prefix}{}.weight", leaf.replace("{}", &e.to_string())));
        let one = |e: usize| experts.each.iter().map(|leaf| of(e, leaf).cloned()).collect::<Option<Vec<_>>>();
        let names = (0..count).map(one).collect::<Option<Vec<_>>>().filter(|n| n.iter().all(|n| !n.is_empty()))?;
        let each: Vec<Vec<usize>> = names[0].iter().map(|n| shape(n)).collect::<Option<_>>()?;
        let rows = each.iter().map(|s| s[0]).sum();
        Some(Stored { shape: vec![count, rows, *each[0].last()?], names })
    }

    /// Prefix, names and number of the experts whose matrices are asked for under a name.
    fn experts(&self, name: &str) -> Option<(&str, Experts, usize)> {
        let head = self.architecture.head.iter().flat_map(|head| &head.steps);
        self.architecture.layers.iter().flatten().chain(head).flat_map(|s| &s.branches).find_map(|b| {
            let Plan::Moe(plan) = &b.plan else { return None };
            // The head is outside of the model's prefix.
            let prefix = b.prefix.trim_start_matches('/');
            let leaf = name.strip_prefix(prefix)?;
            let leaf = leaf.strip_suffix(".weight").unwrap_or(leaf);
            let experts = [plan.input, plan.output].into_iter().find(|e| e.stacked == leaf)?;
            Some((prefix, experts, plan.experts))
        })
    }

    /// The shape of a weight without sizes of 1; `None` if the model does not use it, or its tensor was found before.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let stored = self.stored(name)?;
        let mut found = self.found.borrow_mut();
        let fresh = stored.names.iter().flatten().all(|n| !found.contains(n));
        found.extend(stored.names.into_iter().flatten());
        fresh.then_some(stored.shape)
    }

    /// The rows of a tensor of the file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for stored elements of a type that is not read.
    pub fn rows(&self, part: &Part) -> Result<Rows> {
        let stored = self.stored(&part.weight).expect("a part is made of a weight");
        let width = if stored.shape.len() < 2 { 1 } else { stored.shape[stored.shape.len() - 1] };
        let (mut pieces, mut change) = (Vec::new(), part.change);
        for name in stored.names.iter().flatten() {
            let info = self.checkpoint.info(name).expect("the name is stored");
            let (runs, done) = self.checkpoint.find_runs(&[name], &info.shape)?;
            // What is done to stored elements where they are read is what would be undone.
            if done == part.change {
                change = Change::None;
            }
            pieces.extend(runs);
        }
        let each = pieces.len() / stored.names.len();
        let count = |t: &StoredTensor| t.shape.iter().product::<usize>() / width;
        // Rows of each tensor that are rows of one of the outermost entries.
        let outer = stored.shape.iter().rev().skip(2).product::<usize>();
        let per_entry = outer / stored.names.len();
        let rows = |run: &Run| if run.is_whole() { count(&run.tensor) / per_entry } else { run.count };
        let each: Vec<usize> = pieces[..each].iter().map(rows).collect();
        let mut runs = Vec::new();
        for entry in 0..outer {
            for row in &part.rows {
                let (mut row, mut piece) = (*row, 0);
                while row >= each[piece] {
                    row -= each[piece];
                    piece += 1;
                }
                let at = entry / per_entry * each.len() + piece;
                let from = &pieces[at];
                let before = entry % per_entry * (count(&from.tensor) / per_entry);
                push(&mut runs, at, before + from.first + row * from.step);
            }
        }
        let factors = self.factors.get(self.relative(&part.weight));
        let factors = match factors.map(Vec::as_slice) {
            // Factors of rows stand in the order of the weight.
            Some(each) if each.len() > 1 => part.rows.iter().map(|row| each[*row]).collect(),
            one => one.unwrap_or_default().to_vec(),
        };
        let tensors = pieces.into_iter().map(|piece| piece.tensor).collect();
        Ok(Rows { width, tensors, runs, columns: part.columns.clone(), change, factors })
    }

    /// Refuses a model of which a tensor has no place in the file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the tensor.
    pub fn all_found(&self, label: &str, arch: &str) -> Result<()> {
        let found = self.found.borrow();
        match self.used.iter().find(|name| !found.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(Error::Unsupported {
                what: format!("{label}: tensor `{name}` in a GGUF file of architecture {arch:?}"),
                why: "such files have no place for it; use the folder as it is".into(),
            }),
        }
    }
}

/// A shape without sizes of 1, of which files may have any number.
fn squeezed(shape: &[usize]) -> Vec<usize> {
    let rest: Vec<usize> = shape.iter().copied().filter(|n| *n != 1).collect();
    if rest.is_empty() { vec![1] } else { rest }
}
