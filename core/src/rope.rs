//! Rotary position embedding: the frequencies of a configuration.

use crate::{Error, Result, config::Config};

/// How the base frequencies are changed for contexts longer than those of the training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All positions are divided by `factor`.
    Linear {
        /// Greater than 0.
        factor: f32,
    },
    /// Long wavelengths are stretched, short ones kept, with a ramp between.
    Llama3 {
        /// Stretch of the long wavelengths.
        factor: f32,
        /// Wavelengths above `original_positions / low_freq_factor` are long.
        low_freq_factor: f32,
        /// Wavelengths below `original_positions / high_freq_factor` are short; greater than `low_freq_factor`.
        high_freq_factor: f32,
        /// Context of the training before the scaling.
        original_positions: f32,
    },
}

/// Rotary embedding of the first `rotary_dims` of a head, in the half-split convention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Rotated dimensions of a head, even; the others pass through.
    pub rotary_dims: usize,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Reads either spelling: `rope_parameters` (newer), or `rope_theta`, `rope_scaling` and `partial_rotary_factor`.
    ///
    /// # Errors
    /// [`Error::BadModel`] for impossible values, [`Error::Unsupported`] for a kind of scaling that is not known.
    pub fn read(config: &Config, head_dim: usize, default_theta: f32) -> Result<Self> {
        Self::read_or(config, head_dim, default_theta, 1.0)
    }

    /// The same where a configuration that does not say otherwise rotates `default_part` of a head.
    ///
    /// # Errors
    /// As for [`Rope::read`].
    pub fn read_or(config: &Config, head_dim: usize, default_theta: f32, default_part: f32) -> Result<Self> {
        let object = config.opt_object("rope_parameters|rope_scaling")?;
        let inside = |key: &str| object.as_ref().map_or(Ok(None), |o| o.opt_f64(key));
        // The nested value wins: a top-level one comes from the older format.
        let either = |key: &str, default: f64| match inside(key)? {
            Some(x) => Ok(x),
            None => Ok::<_, Error>(config.opt_f64(key)?.unwrap_or(default)),
        };
        let theta = either("rope_theta", default_theta.into())? as f32;
        if theta < 1.0 {
            return Err(config.bad("rope_theta", format_args!("{theta} is less than 1")));
        }
        let part = either("partial_rotary_factor", default_part.into())?;
        let rotary_dims = if part > 0.0 && part <= 1.0 { (head_dim as f64 * part) as usize } else { 0 };
        if rotary_dims == 0 || rotary_dims % 2 != 0 {
            let why = format!("{part} of a head of {head_dim} is not a positive even number of dimensions");
            return Err(config.bad("partial_rotary_factor", why));
        }
        let scaling = object.as_ref().map_or(Ok(RopeScaling::None), read_scaling)?;
        Ok(Self { theta, rotary_dims, scaling })
    }

    /// Angle per position of each rotated pair, `[rotary_dims / 2]`, radians.
    pub fn inv_freq(&self) -> Vec<f32> {
        let base = |i: usize| f64::from(self.theta).powf(-2.0 * i as f64 / self.rotary_dims as f64);
        (0..self.rotary_dims / 2).map(|i| self.scaling.apply(base(i)) as f32).collect()
    }
}

impl RopeScaling {
    fn apply(self, f: f64) -> f64 {
        match self {
            Self::None => f,
            Self::Linear { factor } => f / f64::from(factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let [factor, low, high, original] =
                    [factor, low_freq_factor, high_freq_factor, original_positions].map(f64::from);
                // Periods of this frequency in the original context: the ramp runs from `low` to `high` of them.
                let periods = original * f / std::f64::consts::TAU;
                let keep = ((periods - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - keep) * f / factor + keep * f
            }
        }
    }
}

fn read_scaling(object: &Config) -> Result<RopeScaling> {
    let positive = |key: &str| {
        let x = object.f32(key)?;
        if x > 0.0 { Ok(x) } else { Err(object.bad(key, format_args!("{x} is not greater than 0"))) }
    };
    match object.opt_str("rope_type|type")? {
        // All multimodal sections have the same positions in text, which is the plain embedding.
        Some("default" | "mrope") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: positive("factor")? }),
        Some("llama3") => {
            let (low_freq_factor, high_freq_factor) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
            if low_freq_factor >= high_freq_factor {
                return Err(object.bad("high_freq_factor", "it must be greater than `low_freq_factor`"));
            }
            let original_positions = positive("original_max_position_embeddings")?;
            Ok(RopeScaling::Llama3 {
                factor: positive("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            })
        }
        None if object.is_empty() => Ok(RopeScaling::None),
        None if object.has("factor") || !object.has("rope_theta|partial_rotary_factor") => {
            Err(object.bad("rope_type", "it is missing, so the kind of scaling is not known"))
        }
        None => Ok(RopeScaling::None),
        Some(other) => Err(Error::Unsupported {
            what: format!("{}: RoPE scaling of type {other:?}", object.file()),
            why: "the supported types are default, linear and llama3".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, head_dim: usize) -> Result<Rope> {
        Rope::read(&Config::parse("config.json", text.as_bytes()).unwrap(), head_dim, 1e4)
    }

    #[test]
    fn both_spellings_mean_the_same() {
        let old = read(r#"{"rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_scaling": null}"#, 64).unwrap();
        let new =
            r#"{"rope_parameters": {"rope_type": "default", "rope_theta": 500000, "partial_rotary_factor": 0.25}}"#;
        assert_eq!(old, read(new, 64).unwrap());
        assert_eq!(old, Rope { theta: 5e5, rotary_dims: 16, scaling: RopeScaling::None });
        let part = |part: &str| read(&format!(r#"{{"partial_rotary_factor": {part}}}"#), 40).unwrap().rotary_dims;
        assert_eq!([part("0.35"), part("0.7"), part("0.3")], [14, 28, 12]);
        let plain = Rope { theta: 1e4, rotary_dims: 8, scaling: RopeScaling::None };
        assert_eq!([read("{}", 8).unwrap(), read(r#"{"rope_scaling": {}}"#, 8).unwrap()], [plain; 2]);
        let freq = read("{}", 8).unwrap().inv_freq();
        assert_eq!(freq, [1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn llama3_scaling_follows_the_published_formula() {
        let rope = read(
            r#"{"rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}}"#,
            128,
        )
        .unwrap();
        let mut ramps = 0;
        for (i, got) in rope.inv_freq().into_iter().enumerate() {
            let f = 5e5f64.powf(-(i as f64) / 64.0);
            let wavelength = std::f64::consts::TAU / f;
            let (long, short) = (8192.0, 2048.0);
            let want = if wavelength > long {
                f / 8.0
            } else if wavelength < short {
                f
            } else {
                ramps += 1;
                let s = (8192.0 / wavelength - 1.0) / 3.0;
                (1.0 - s) * f / 8.0 + s * f
            };
            assert!((f64::from(got) / want - 1.0).abs() < 1e-6, "frequency {i}: {got}, {want}");
        }
        assert!(ramps > 2);
    }

    #[test]
    fn linear_scaling_divides_every_position() {
        for text in [
            r#"{"rope_scaling": {"type": "linear", "factor": 4.0}}"#,
            r#"{"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}"#,
        ] {
            let rope = read(text, 8).unwrap();
            assert_eq!(rope.scaling, RopeScaling::Linear { factor: 4.0 });
            assert_eq!(rope.inv_freq(), [0.25, 0.025, 0.0025, 0.000_25]);
        }
    }

    #[test]
    fn what_is_not_known_or_not_possible_is_refused() {
        for (text, expected) in [
            (r#"{"rope_scaling": {"type": "yarn", "factor": 4}}"#, "RoPE scaling of type \"yarn\" is not supported"),
            (r#"{"rope_scaling": {"factor": 4}}"#, "`rope_scaling.rope_type`"),
            (r#"{"rope_parameters": {"full_attention": {"rope_type": "default"}}}"#, "`rope_parameters.rope_type`"),
            (r#"{"rope_scaling": {"type": "linear", "factor": 0}}"#, "`rope_scaling.factor`: 0 is not greater"),
            (r#"{"rope_scaling": {"type": "linear"}}"#, "`rope_scaling.factor` is missing"),
            (r#"{"rope_theta": 0}"#, "`rope_theta`: 0 is less than 1"),
            (r#"{"rope_theta": 1e300}"#, "`rope_theta`: expected a finite number"),
            (r#"{"partial_rotary_factor": 0}"#, "`partial_rotary_factor`"),
            (r#"{"partial_rotary_factor": 1.5}"#, "`partial_rotary_factor`"),
            (r#"{"partial_rotary_factor": 0.05}"#, "`partial_rotary_factor`"),
            (r#"{"rope_scaling": 3}"#, "`rope_scaling`: expected an object"),
        ] {
            let message = read(text, 64).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
