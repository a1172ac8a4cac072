//! `generation_config.json`: the sampling values that the authors of a model recommend.

use crate::{Result, config::Config, sample::Sampling};

/// Contents of the file; every key is optional, and so is the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Whether to sample at all; false or absent means greedy, even if the other values are set.
    pub do_sample: bool,
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`]; it applies to greedy decoding too.
    pub repetition_penalty: Option<f32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

impl GenerationConfig {
    /// Reads the file, called `file` in messages.
    ///
    /// # Errors
    /// [`crate::Error::BadModel`] naming file and key if it is not valid or a value is impossible.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self> {
        let config = Config::parse(file, bytes)?;
        let read = Self {
            do_sample: config.bool_or("do_sample", false)?,
            temperature: config.opt_f32("temperature")?,
            top_k: config.opt_count("top_k")?.map(|k| k as u32),
            top_p: config.opt_f32("top_p")?,
            min_p: config.opt_f32("min_p")?,
            repetition_penalty: config.opt_f32("repetition_penalty")?,
            eos: config.eos_token_ids()?,
        };
        // Impossible values are reported here and not at the first request.
        read.sampling(0).check().map_err(|e| crate::Error::model(file, e.to_string()))?;
        Ok(read)
    }

    /// The sampling that the file asks for.
    pub fn sampling(&self, seed: u64) -> Sampling {
        let greedy = Sampling { seed, ..Sampling::default() };
        let penalty = Sampling { repetition_penalty: self.repetition_penalty.unwrap_or(1.0), ..greedy };
        if !self.do_sample {
            return penalty;
        }
        Sampling {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            ..penalty
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<GenerationConfig> {
        GenerationConfig::parse("generation_config.json", text.as_bytes())
    }

    #[test]
    fn without_do_sample_everything_but_the_penalty_is_ignored() {
        let text = r#"{"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1, "eos_token_id": [2, 7]}"#;
        let greedy = parse(text).unwrap();
        assert_eq!(greedy.sampling(5), Sampling { repetition_penalty: 1.1, seed: 5, ..Sampling::default() });
        assert_eq!(greedy.eos, [2, 7]);
        let sampled = parse(&text.replacen('{', r#"{"do_sample": true, "top_k": 20, "min_p": null, "#, 1)).unwrap();
        let want = Sampling { temperature: 0.7, top_k: 20, top_p: 0.95, min_p: 0.0, repetition_penalty: 1.1, seed: 5 };
        assert_eq!(sampled.sampling(5), want);
        assert!(parse("{}").unwrap().sampling(0).is_greedy());
    }

    #[test]
    fn impossible_values_name_the_file() {
        for text in [r#"{"do_sample": true, "top_p": 7}"#, r#"{"top_k": "x"}"#, r#"{"do_sample": 1}"#, "{"] {
            assert!(parse(text).unwrap_err().to_string().starts_with("generation_config.json: "), "{text}");
        }
    }
}
