//! Several engines with the same model behind one server. A request goes to the engine that has the longest beginning of its prompt,
//! and among equal ones to that with the fewest requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use selkie_core::{
    session::{Facts, Model, Snapshot},
    state::Realm,
};

/// Loaded engines, at least one.
pub struct Replicas {
    models: Vec<Model>,
    requests: Requests,
}

/// Requests that run in each engine or wait.
#[derive(Clone)]
struct Requests(Arc<Mutex<Vec<usize>>>);

/// A request's place in an engine, free again when this is dropped.
pub struct Placed {
    /// The engine.
    pub model: Model,
    which: usize,
    requests: Requests,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.requests.lock()[self.which] -= 1;
    }
}

impl Replicas {
    /// Of loaded engines.
    pub fn new(models: Vec<Model>) -> Self {
        let requests = Requests(Arc::new(Mutex::new(vec![0; models.len()])));
        Self { models, requests }
    }

    /// All engines.
    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.models.iter()
    }

    /// Takes a place for a request with this prompt; `None` without engines. Several engines are asked between two of their steps.
    pub async fn place(&self, prompt: &[u32], namespace: &str) -> Option<Placed> {
        let mut known = vec![0; self.models.len()];
        if known.len() > 1 {
            let ask = |model: &Model| {
                let (tokens, realm) = (prompt.to_vec(), Realm { namespace: namespace.to_owned(), ..Realm::default() });
                model.with(move |engine| engine.scheduler().coverage(&realm, &tokens).usable)
            };
            let asked: Vec<_> = self.models.iter().map(ask).collect();
            for (known, reply) in known.iter_mut().zip(asked) {
                // One that has failed is found out by the request.
                *known = reply.await.unwrap_or_default();
            }
        }
        let batch = self.models.first()?.facts().max_batch;
        let mut requests = self.requests.lock();
        let now: Vec<_> = known.into_iter().zip(requests.iter().copied()).collect();
        let which = choose(&now, batch)?;
        requests[which] += 1;
        drop(requests);
        Some(Placed { model: self.models[which].clone(), which, requests: self.requests.clone() })
    }

    /// Facts and counters of all engines together; `None` without engines.
    pub fn summed(&self) -> Option<(Facts, Snapshot)> {
        let mut models = self.models();
        let first = models.next()?;
        let (mut facts, mut now) = (first.facts().clone(), first.stats());
        for model in models {
            let more = model.facts();
            facts.max_batch += more.max_batch;
            facts.slots += more.slots;
            facts.pages += more.pages;
            facts.weight_bytes += more.weight_bytes;
            now.add(&model.stats());
        }
        Some((facts, now))
    }
}

/// The engine for a request, of those with so many tokens of its prompt and so many requests. One that is ahead of another by a whole
/// batch is left out: its queue takes longer than a prompt.
fn choose(engines: &[(usize, usize)], batch: usize) -> Option<usize> {
    let least = engines.iter().map(|(_, requests)| *requests).min()?;
    let possible = (0..engines.len()).filter(|i| engines[*i].1 < least + batch.max(1));
    // The first of equal ones.
    possible.min_by_key(|i| (std::cmp::Reverse(engines[*i].0), engines[*i].1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_prefix_then_by_load() {
        assert_eq!(choose(&[], 4), None);
        assert_eq!(choose(&[(0, 0), (0, 0)], 4), Some(0));
        assert_eq!(choose(&[(0, 2), (0, 1), (0, 1)], 4), Some(1));
        assert_eq!(choose(&[(0, 0), (128, 3), (64, 0)], 4), Some(1));
        assert_eq!(choose(&[(128, 2), (128, 1)], 4), Some(1));
        // Its batch is full, and another engine is idle.
        assert_eq!(choose(&[(0, 0), (128, 4), (64, 1)], 4), Some(2));
        assert_eq!(choose(&[(0, 3), (128, 5)], 4), Some(1));
    }
}
