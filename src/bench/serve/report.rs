//! The figures of `selkie bench serve`.

use selkie_core::{model_dir::ModelFiles, session::Facts};
use serde_json::{Value, json};

use super::{Case, Round, Way, size, thousands};
use crate::args::BenchServeArgs;

/// What was measured.
pub struct Report<'a> {
    pub args: &'a BenchServeArgs,
    /// Requests of a round.
    pub requests: usize,
    pub files: &'a ModelFiles,
    /// The tokenizer is a made-up one.
    pub invented: bool,
    pub facts: &'a Facts,
    pub cases: Vec<Case>,
}

/// Milliseconds.
struct Times {
    mean: f64,
    p50: f64,
    p99: f64,
}

impl Report<'_> {
    fn rate(&self, way: Way, of: fn(&Round) -> f64) -> Option<f64> {
        let case = self.cases.iter().find(|case| case.way == way)?;
        Some(median(case.rounds.iter().map(of).collect()))
    }

    /// Whether all answers of a round are decoded at the same time, and it is seen.
    fn is_decoding(&self) -> bool {
        !self.args.no_stream && self.requests <= self.args.clients
    }

    /// Times to the first token of all requests, if they were streamed.
    fn first_token(&self, case: &Case) -> Option<Times> {
        let answers = case.rounds.iter().flat_map(|round| &round.told).filter(|_| !self.args.no_stream);
        let times = answers.filter_map(|(asked, told)| Some((*told.at.first()? - *asked).as_secs_f64() * 1e3));
        let mut all: Vec<f64> = times.collect();
        all.sort_by(f64::total_cmp);
        let at = |share: f64| all.get((share * all.len().saturating_sub(1) as f64).round() as usize).copied();
        Some(Times { p50: at(0.5)?, p99: at(0.99)?, mean: all.iter().sum::<f64>() / all.len() as f64 })
    }

    /// The case that another one is compared with, and the share of its rate.
    fn compared(&self, way: Way) -> Option<(Way, f64)> {
        let (with, of): (Way, fn(&Round) -> f64) = match way {
            Way::Direct => return None,
            Way::Http => (Way::Direct, Round::rate),
            Way::Idle => (Way::Http, Round::rate),
            Way::Schema => (Way::Http, Round::decode_rate),
        };
        Some((with, self.rate(way, of)? / self.rate(with, of)?))
    }

    /// As a table.
    pub fn text(&self) -> String {
        let BenchServeArgs { clients, shared_tokens, own_tokens, decode_tokens, runs, .. } = self.args;
        let Facts { backend, device, .. } = self.facts;
        let words = if self.invented { "; its tokenizer is a made-up one" } else { "" };
        let how = if self.args.no_stream { "whole" } else { "streamed" };
        let mut text = format!("{} on {backend} ({device}){words}\n", self.files.label());
        text += &format!(
            "({clients} clients, {} requests of {shared_tokens} shared and {own_tokens} own tokens, {decode_tokens} new \
             ones, {how}; medians of {runs} alternating rounds)\n",
            self.requests
        );
        text += &format!(
            "{:<28}{:>10}{:>11}{:>28}{:>17}\n",
            "", "tokens/s", "decoding", "first token ms mean/p50/p99", "generator's CPU"
        );
        for case in &self.cases {
            let rate = |of| thousands(self.rate(case.way, of).unwrap_or_default());
            let times =
                self.first_token(case).map_or("-".into(), |t| format!("{:.1} / {:.1} / {:.1}", t.mean, t.p50, t.p99));
            let decoding = if self.is_decoding() { rate(Round::decode_rate) } else { "-".into() };
            let generator = case.generator().map_or("-".into(), |s| format!("{s:.2} s a round"));
            let line = (self.name(case.way), rate(Round::rate));
            text += &format!("{:<28}{:>10}{decoding:>11}{times:>28}{generator:>17}\n", line.0, line.1);
        }
        for case in &self.cases {
            let Some((with, share)) = self.compared(case.way) else { continue };
            let what = if case.way == Way::Schema { "decoding" } else { "tokens/s" };
            text += &format!("{}: {:.1} % of the {what} of {}", self.name(case.way), 100.0 * share, self.name(with));
            if let Some(bytes) = case.bytes {
                text += &format!(", {} of memory per idle connection", size(bytes));
            }
            text += "\n";
        }
        text
    }

    fn name(&self, way: Way) -> String {
        match way {
            Way::Direct => "without HTTP".into(),
            Way::Http => "HTTP".into(),
            Way::Idle => format!("HTTP, {} idle connections", thousands(self.args.idle_connections as f64)),
            Way::Schema => "HTTP, JSON schema".into(),
        }
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        let case = |case: &Case| {
            let times = self.first_token(case).map(|t| json!({ "mean": t.mean, "p50": t.p50, "p99": t.p99 }));
            let decoding = self.rate(case.way, Round::decode_rate).filter(|_| self.is_decoding());
            let compared = self.compared(case.way);
            let answers = || case.rounds.iter().flat_map(|round| &round.told);
            json!({
                "case": case.way.key(),
                "requests": answers().count(),
                "tokens": answers().map(|(_, told)| told.ids.len()).sum::<usize>(),
                "tokens_per_second": self.rate(case.way, Round::rate),
                "decode_tokens_per_second": decoding,
                "first_token_ms": times,
                "generator_cpu_seconds": case.generator(),
                "compared_with": compared.map(|(with, _)| with.key()),
                "share": compared.map(|(_, share)| share),
                "bytes_per_idle_connection": case.bytes,
            })
        };
        json!({
            "model": self.files.label(),
            "made_up_tokenizer": self.invented,
            "backend": self.facts.backend,
            "device": self.facts.device,
            "version": env!("CARGO_PKG_VERSION"),
            "clients": self.args.clients,
            "requests": self.requests,
            "shared_tokens": self.args.shared_tokens,
            "own_tokens": self.args.own_tokens,
            "decode_tokens": self.args.decode_tokens,
            "streamed": !self.args.no_stream,
            "idle_connections": self.args.idle_connections,
            "runs": self.args.runs,
            "cases": self.cases.iter().map(case).collect::<Vec<_>>(),
        })
    }
}

impl Way {
    fn key(self) -> &'static str {
        match self {
            Self::Direct => "no_http",
            Self::Http => "http",
            Self::Idle => "http_idle",
            Self::Schema => "http_schema",
        }
    }
}

impl Round {
    /// New tokens per second, from the first request to the last token.
    fn rate(&self) -> f64 {
        self.told.iter().map(|(_, told)| told.ids.len()).sum::<usize>() as f64 / self.seconds
    }

    /// New tokens per second while all answers are decoded: from the last of their first tokens to the first of their ends. If
    /// there is no such time, 0.
    fn decode_rate(&self) -> f64 {
        let at = || self.told.iter().map(|(_, told)| &told.at);
        let (Some(start), Some(end)) = (at().filter_map(|at| at.first()).max(), at().filter_map(|at| at.last()).min())
        else {
            return 0.0;
        };
        let pieces = at().flatten().filter(|at| *at > start && *at <= end).count();
        if end > start { pieces as f64 / (*end - *start).as_secs_f64() } else { 0.0 }
    }
}

impl Case {
    /// Mean processor seconds of the load generator in a round.
    fn generator(&self) -> Option<f64> {
        let all: Option<Vec<f64>> = self.rounds.iter().map(|round| round.generator).collect();
        all.map(|all| all.iter().sum::<f64>() / all.len().max(1) as f64)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
