//! Prometheus text: vLLM's names, so that its dashboards and routers work, and `selkie:*` for what only this engine has.

use std::{
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use selkie_core::session::{Facts, Snapshot};
use selkie_core::state::Reason;

use super::voice::Ended;

/// Upper ends of buckets for times of requests, in seconds.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// The same for numbers of tokens.
const TOKENS: &[f64] = &[
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1000.0,
    2000.0,
    5000.0,
    10_000.0,
    20_000.0,
    50_000.0,
    100_000.0,
    200_000.0,
    500_000.0,
    1_000_000.0,
];

struct Histogram {
    ends: &'static [f64],
    /// Values up to each end, and beyond the last one; not cumulative.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(ends: &'static [f64]) -> Self {
        Self { ends, counts: vec![0; ends.len() + 1], sum: 0.0 }
    }

    fn add(&mut self, value: f64) {
        self.counts[self.ends.partition_point(|end| *end < value)] += 1;
        self.sum += value;
    }

    fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// What has happened to requests: the engine counts the rest.
pub struct Metrics {
    histograms: Mutex<[(&'static str, &'static str, Histogram); 12]>,
    /// Answers by reason of their end: stop, length, abort, error.
    ends: [AtomicU64; 4],
    refused: AtomicU64,
    /// Prompts by what became of their hand-over: over, known, not.
    handed: [AtomicU64; 3],
    handed_tokens: AtomicU64,
    handed_bytes: AtomicU64,
}

/// What became of a prompt that one server computes for another.
pub enum Handed {
    /// It went over.
    Over {
        /// Tokens that need not be computed.
        tokens: usize,
        /// Bytes of its bundle.
        bytes: u64,
    },
    /// The other side had all of it.
    Known,
    /// Nothing came of it.
    Not,
}

/// The reasons of `request_success`, in the order of [`Metrics::ends`].
const ENDS: [&str; 4] = ["stop", "length", "abort", "error"];

/// How an answer ended that gave no [`Ended`].
#[derive(Clone, Copy)]
pub enum Broken {
    /// The client left, or the server shut down.
    Aborted = 2,
    /// It failed.
    Failed = 3,
}

impl Metrics {
    /// None yet.
    pub fn new() -> Self {
        let time = |name, help| (name, help, Histogram::new(SECONDS));
        let tokens = |name, help| (name, help, Histogram::new(TOKENS));
        Self {
            histograms: Mutex::new([
                time("vllm:time_to_first_token_seconds", "From the request to its first token."),
                time("vllm:inter_token_latency_seconds", "Between two tokens of an answer."),
                time("vllm:request_time_per_output_token_seconds", "Mean time between the tokens of an answer."),
                time("vllm:e2e_request_latency_seconds", "From the request to the end of its answer."),
                time("vllm:request_queue_time_seconds", "From the request to its first step."),
                time("vllm:request_inference_time_seconds", "From its first step to its end."),
                time("vllm:request_prefill_time_seconds", "From its first step to its first token."),
                time("vllm:request_decode_time_seconds", "From its first token to its end."),
                tokens("vllm:request_prompt_tokens", "Tokens of a prompt."),
                tokens("vllm:request_generation_tokens", "Tokens of an answer."),
                tokens("vllm:request_params_n", "Answers that a request asks for."),
                tokens("vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that were computed."),
            ]),
            ends: Default::default(),
            refused: AtomicU64::new(0),
            handed: Default::default(),
            handed_tokens: AtomicU64::new(0),
            handed_bytes: AtomicU64::new(0),
        }
    }

    fn add(&self, values: &[(usize, f64)]) {
        let mut histograms = self.histograms.lock().unwrap_or_else(PoisonError::into_inner);
        values.iter().for_each(|(i, value)| histograms[*i].2.add(*value));
    }

    /// A request for `n` answers was accepted.
    pub fn started(&self, n: usize) {
        self.add(&[(10, n as f64)]);
    }

    /// A request was refused because too many run and wait.
    pub fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// A prompt was handed over, or not.
    pub fn handed(&self, what: &Handed) {
        let which = match what {
            Handed::Over { tokens, bytes } => {
                self.handed_tokens.fetch_add(*tokens as u64, Ordering::Relaxed);
                self.handed_bytes.fetch_add(*bytes, Ordering::Relaxed);
                0
            }
            Handed::Known => 1,
            Handed::Not => 2,
        };
        self.handed[which].fetch_add(1, Ordering::Relaxed);
    }

    /// A later token of an answer came after this time.
    pub fn token(&self, after: Duration) {
        self.add(&[(1, after.as_secs_f64())]);
    }

    /// An answer has ended.
    pub fn ended(&self, ended: &Ended) {
        let t = &ended.timing;
        let [queue, prefill, decode] = [t.queue_ms, t.prefill_ms, t.decode_ms].map(|ms| ms / 1e3);
        let tokens = ended.ids.len();
        self.add(&[
            (0, queue + prefill),
            (2, decode / tokens.saturating_sub(1).max(1) as f64),
            (3, queue + prefill + decode),
            (4, queue),
            (5, prefill + decode),
            (6, prefill),
            (7, decode),
            (8, ended.prompt_tokens as f64),
            (9, tokens as f64),
            (11, (ended.prompt_tokens - ended.reused.min(ended.prompt_tokens)) as f64),
        ]);
        let end = usize::from(ended.openai_finish() == "length");
        self.ends[end].fetch_add(1, Ordering::Relaxed);
    }

    /// Answers have ended otherwise.
    pub fn broken(&self, how: Broken, count: usize) {
        self.ends[how as usize].fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Mean seconds of an answer; 1 before there is one.
    pub fn mean_seconds(&self) -> f64 {
        let histograms = self.histograms.lock().unwrap_or_else(PoisonError::into_inner);
        let all = &histograms[3].2;
        if all.count() == 0 { 1.0 } else { all.sum / all.count() as f64 }
    }

    /// The text.
    pub fn text(&self, model: &str, facts: &Facts, now: &Snapshot) -> String {
        let mut page = Page::new(model);
        gauges(&mut page, facts, now);
        counters(&mut page, now);
        page.family("vllm:request_success_total", "counter", "Answers by the reason of their end.");
        for (end, count) in ENDS.iter().zip(&self.ends) {
            page.line(
                "vllm:request_success_total",
                &format!("finished_reason=\"{end}\""),
                count.load(Ordering::Relaxed) as f64,
            );
        }
        let refused = self.refused.load(Ordering::Relaxed);
        page.one("vllm:admission_rejections_total", "counter", "Requests that found no place.", refused as f64);
        let name = "selkie:handover_total";
        page.family(name, "counter", "Prompts that one server computes for another, by what became of them.");
        for (result, count) in ["over", "known", "not"].iter().zip(&self.handed) {
            page.line(name, &format!("result=\"{result}\""), count.load(Ordering::Relaxed) as f64);
        }
        for (name, help, count) in [
            ("selkie:handover_tokens_total", "Prompt tokens whose state was handed over.", &self.handed_tokens),
            ("selkie:handover_bytes_total", "Bytes that were handed over.", &self.handed_bytes),
        ] {
            page.one(name, "counter", help, count.load(Ordering::Relaxed) as f64);
        }
        let histograms = self.histograms.lock().unwrap_or_else(PoisonError::into_inner);
        histograms.iter().for_each(|(name, help, histogram)| page.histogram(name, help, histogram));
        page.text
    }
}

fn share(used: usize, of: usize) -> f64 {
    if of == 0 { 0.0 } else { used as f64 / of as f64 }
}

fn gauges(page: &mut Page, facts: &Facts, now: &Snapshot) {
    page.one("vllm:num_requests_running", "gauge", "Answers in the batch.", now.running as f64);
    page.one("vllm:num_requests_waiting", "gauge", "Answers that wait for a place in the batch.", now.waiting as f64);
    let name = "vllm:num_requests_waiting_by_reason";
    page.family(name, "gauge", "The same: for a place, or for a prefix that another answer computes.");
    for (reason, count) in [("capacity", now.waiting - now.deferred.min(now.waiting)), ("deferred", now.deferred)] {
        page.line(name, &format!("reason=\"{reason}\""), count as f64);
    }
    // What running requests hold of the tighter pool: idle cached states and pages are free for a new request.
    let slots = share(now.slots_used - now.slots_cached.min(now.slots_used), facts.slots);
    let pages = share(now.pages_used - now.pages_cached.min(now.pages_used), facts.pages);
    page.one(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share that running answers hold of the tighter of KV pages and state slots.",
        slots.max(pages).min(1.0),
    );
    page.family("vllm:cache_config_info", "gauge", "Sizes of the cache.");
    let config = format!(
        "block_size=\"{}\",num_gpu_blocks=\"{}\",num_state_slots=\"{}\",enable_prefix_caching=\"True\"",
        facts.block, facts.pages, facts.slots
    );
    page.line("vllm:cache_config_info", &config, 1.0);
    for (name, help, value) in [
        ("selkie:tenants_waiting", "Namespaces of keys whose answers wait.", now.waiting_shares as f64),
        ("selkie:state_slots", "State slots of the pool.", facts.slots as f64),
        ("selkie:state_slots_used", "State slots that hold a state.", now.slots_used as f64),
        ("selkie:state_slots_cached", "States in the prefix tree.", now.slots_cached as f64),
        ("selkie:kv_pages", "KV pages of the pool.", facts.pages as f64),
        ("selkie:kv_pages_used", "KV pages that hold keys and values.", now.pages_used as f64),
        ("selkie:kv_pages_cached", "KV pages in the prefix tree.", now.pages_cached as f64),
        ("selkie:state_slot_bytes", "Bytes of a state slot.", facts.sizes.shape.slot_bytes as f64),
        ("selkie:kv_page_bytes", "Bytes of a KV page.", facts.sizes.shape.page_bytes as f64),
        ("selkie:weight_bytes", "Bytes of the weights.", facts.weight_bytes as f64),
        ("selkie:host_cache_bytes", "Bytes in host memory.", now.counters.tiers.host_bytes as f64),
        ("selkie:disk_cache_bytes", "Bytes of files in the disk cache.", now.counters.tiers.disk_bytes as f64),
    ] {
        page.one(name, "gauge", help, value);
    }
}

fn counters(page: &mut Page, now: &Snapshot) {
    let s = &now.counters;
    let prompt = s.tokens_prefilled + s.tokens_reused;
    for (name, help, value) in [
        ("vllm:prefix_cache_queries_total", "Prompt tokens that the prefix cache was asked for.", prompt),
        ("vllm:prefix_cache_hits_total", "Prompt tokens that were reused.", s.tokens_reused),
        ("vllm:prompt_tokens_total", "Prompt tokens.", prompt),
        ("vllm:prompt_tokens_cached_total", "Prompt tokens that were reused.", s.tokens_reused),
        ("vllm:generation_tokens_total", "Generated tokens.", s.tokens_generated),
        ("vllm:num_preemptions_total", "Answers that were put back into the queue.", s.preemptions),
        ("vllm:spec_decode_num_drafts_total", "Rows of steps that verified guessed tokens.", s.drafts.rows),
        ("vllm:spec_decode_num_draft_tokens_total", "Guessed tokens in them.", s.drafts.tokens),
        ("vllm:spec_decode_num_accepted_tokens_total", "Guessed tokens that were right.", s.drafts.accepted()),
        ("selkie:steps_total", "Steps of the engine.", s.steps),
        ("selkie:tokens_recomputed_total", "Tokens computed again after a pre-emption.", s.tokens_recomputed),
        ("selkie:captures_total", "States captured for the prefix tree.", s.captures),
        ("selkie:captures_skipped_total", "Captures that found no slot.", s.captures_skipped),
        ("selkie:evicted_states_total", "Cached states lost for lack of room.", s.evictions.slots),
        ("selkie:evicted_pages_total", "Cached pages lost for lack of room.", s.evictions.nodes),
        ("selkie:tier_loads_total", "Requests that went on from a prefix of a lower tier.", s.tiers.loads),
        ("selkie:tier_declined_total", "Requests for which computing was faster than loading.", s.tiers.declined),
        ("selkie:tier_demoted_total", "States and pages copied to lower tiers.", s.tiers.demoted),
        ("selkie:tier_converted_total", "Requests that went on from int8 states of lower tiers.", s.tiers.converted),
        ("selkie:host_cache_evicted_total", "States and pages that left host memory.", s.tiers.host_evicted),
    ] {
        page.one(name, "counter", help, value as f64);
    }
    let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
    page.family(name, "counter", "The same by their place after the token that was known.");
    for (place, accepted) in s.drafts.accepted_at.iter().enumerate() {
        page.line(name, &format!("position=\"{place}\""), *accepted as f64);
    }
    let name = "selkie:tier_tokens_total";
    page.family(name, "counter", "Reused prompt tokens by the lower tier that they came from.");
    for (tier, tokens) in [("host", s.tiers.host_tokens), ("disk", s.tiers.disk_tokens)] {
        page.line(name, &format!("tier=\"{tier}\""), tokens as f64);
    }
    let name = "selkie:prefix_cache_requests_total";
    page.family(name, "counter", "Requests by the reason for which not more was reused.");
    for reason in Reason::ALL {
        page.line(name, &format!("reason=\"{}\"", reason.name()), s.reason(reason) as f64);
    }
}

/// The text as it grows.
struct Page {
    text: String,
    /// The labels of every line.
    labels: String,
}

impl Page {
    fn new(model: &str) -> Self {
        let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        Self { text: String::new(), labels: format!("model_name=\"{model}\",engine=\"0\"") }
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string can be written");
    }

    fn line(&mut self, name: &str, more: &str, value: f64) {
        let comma = if more.is_empty() { "" } else { "," };
        writeln!(self.text, "{name}{{{}{comma}{more}}} {value}", self.labels).expect("a string can be written");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, of: &Histogram) {
        self.family(name, "histogram", help);
        let mut sum = 0;
        for (end, count) in of.ends.iter().zip(&of.counts) {
            sum += count;
            self.line(&format!("{name}_bucket"), &format!("le=\"{end:?}\""), sum as f64);
        }
        self.line(&format!("{name}_bucket"), "le=\"+Inf\"", of.count() as f64);
        self.line(&format!("{name}_sum"), "", of.sum);
        self.line(&format!("{name}_count"), "", of.count() as f64);
    }
}

#[cfg(test)]
mod tests {
    use selkie_core::engine::FinishReason;

    use super::*;
    use crate::serve::voice::tests::ended;

    #[test]
    fn buckets_are_cumulative() {
        let metrics = Metrics::new();
        assert_eq!(metrics.mean_seconds(), 1.0);
        metrics.ended(&ended("a", FinishReason::Stop));
        metrics.ended(&ended("b", FinishReason::Length));
        metrics.broken(Broken::Aborted, 2);
        let mut page = Page::new("a\"b\\");
        let histograms = metrics.histograms.lock().unwrap();
        page.histogram(histograms[8].0, histograms[8].1, &histograms[8].2);
        let line = |end: &str| {
            let start =
                format!("vllm:request_prompt_tokens_bucket{{model_name=\"a\\\"b\\\\\",engine=\"0\",le=\"{end}\"}} ");
            page.text.lines().find_map(|l| l.strip_prefix(&start)).map(str::to_owned)
        };
        // Prompts of 100 tokens: an end is part of its bucket.
        assert_eq!([line("50.0"), line("100.0"), line("+Inf")], ["0", "2", "2"].map(|n| Some(n.to_owned())));
        assert!(page.text.contains("vllm:request_prompt_tokens_sum{model_name=\"a\\\"b\\\\\",engine=\"0\"} 200\n"));
        let ends: Vec<u64> = metrics.ends.iter().map(|e| e.load(Ordering::Relaxed)).collect();
        assert_eq!(ends, [1, 1, 2, 0]);
    }
}
