//! A model's layers as text: the input, mixers and output of each residual step.

use std::fmt::Write;

use super::{Architecture, Input, Output, SubLayer};

/// Layers with the same steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Their numbers, e.g. `0-8, 10`.
    pub layers: String,
    /// A line per residual step, e.g. `x += attention(norm(x))`, and the sizes of its mixers.
    pub steps: Vec<Line>,
}

/// A residual step as a formula, and the sizes of its mixers.
pub type Line = (String, String);

impl Architecture {
    /// Equal layers together, in the order of their first.
    pub fn program(&self) -> Vec<Program> {
        let mut kinds: Vec<(Vec<Line>, Vec<usize>)> = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            let steps: Vec<_> = layer.iter().map(step).collect();
            match kinds.iter_mut().find(|(known, _)| *known == steps) {
                Some((_, layers)) => layers.push(i),
                None => kinds.push((steps, vec![i])),
            }
        }
        kinds.into_iter().map(|(steps, layers)| Program { layers: ranges(&layers), steps }).collect()
    }
}

fn step(step: &SubLayer) -> Line {
    let input = match step.input {
        Input::Normed(_) => "norm(x)",
        Input::Stream => "x",
        Input::BesideEmbedding(_) => "norm(x | embedding)",
        Input::Kept(Some(_)) => "norm(y)",
        Input::Kept(None) => "y",
        Input::PlusKept(_) => "norm(x + y)",
    };
    let branch = |b: &super::Branch| match b.scale {
        1.0 => format!("{}({input})", b.plan.name()),
        scale => format!("{scale} {}({input})", b.plan.name()),
    };
    let sum = step.branches.iter().map(branch).collect::<Vec<_>>().join(" + ");
    let formula = match step.output {
        Output::Add => format!("x += {sum}"),
        Output::AddNormed(_) => format!("x += norm({sum})"),
        Output::Keep => format!("y = {sum}"),
    };
    (formula, step.branches.iter().map(|b| b.plan.sizes()).collect::<Vec<_>>().join("; "))
}

/// Ascending numbers, runs of them as `first-last`.
fn ranges(numbers: &[usize]) -> String {
    let mut text = String::new();
    for run in numbers.chunk_by(|a, b| a + 1 == *b) {
        let comma = if text.is_empty() { "" } else { ", " };
        let _ = match run {
            [one] => write!(text, "{comma}{one}"),
            _ => write!(text, "{comma}{}-{}", run[0], run[run.len() - 1]),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn program(folder: &str) -> Vec<Program> {
        let path = format!("{}/../tests/golden/{folder}/config.json", env!("CARGO_MANIFEST_DIR"));
        let config = Config::parse("config.json", &std::fs::read(path).unwrap()).unwrap();
        crate::models::read(&config).unwrap().program()
    }

    #[test]
    fn layers_are_drawn() {
        let olmo = program("olmo_hybrid");
        assert_eq!((olmo[0].layers.as_str(), olmo[1].layers.as_str()), ("0-2", "3"));
        assert_eq!(olmo[0].steps[0].0, "x += Gated DeltaNet(norm(x))");
        assert_eq!(olmo[0].steps[0].1, "4 key heads of 12, 4 value heads of 24");
        assert_eq!(olmo[1].steps[0].0, "x += norm(attention(x))");
        let falcon = program("falcon_h1");
        assert_eq!(falcon.len(), 1);
        assert_eq!(falcon[0].steps[0].0, "x += 0.4 Mamba-2(norm(x)) + 0.9 attention(norm(x))");
        let zamba = program("zamba2");
        let steps = zamba[1].steps.iter().map(|(formula, _)| formula.as_str());
        let want =
            ["y = attention(norm(x | embedding))", "y = MLP(norm(y))", "y = linear(y)", "x += Mamba-2(norm(x + y))"];
        assert!(steps.eq(want));
        let bamba = program("bamba");
        assert_eq!((bamba[0].layers.as_str(), bamba[1].layers.as_str()), ("0-1, 3", "2"));
    }
}
