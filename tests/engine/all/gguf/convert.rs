//! Reference models as GGUF files, the way llama.cpp's converter writes them. Written from its tables rather than from the
//! loader's, so that a mistake in one of them shows.

use std::{path::Path, sync::Arc};

use pollster::block_on;
use selkie_core::{checkpoint::Checkpoint, source::Dir};
use serde_json::Value as Json;

use super::writer::{Value, Writer};

/// A matrix or a stack of them in f32.
#[derive(Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Array {
    pub fn row(&self) -> usize {
        self.values.len() / self.shape[0]
    }

    /// Entries of the first dimension, in this order.
    pub fn take(&self, order: impl IntoIterator<Item = usize>) -> Self {
        let row = self.row();
        let mut values = Vec::new();
        let mut n = 0;
        for i in order {
            values.extend_from_slice(&self.values[i * row..(i + 1) * row]);
            n += 1;
        }
        let mut shape = self.shape.clone();
        shape[0] = n;
        Self { shape, values }
    }

    pub fn map(mut self, f: impl Fn(f32) -> f32) -> Self {
        self.values.iter_mut().for_each(|x| *x = f(*x));
        self
    }

    pub fn reshape(mut self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.values.len());
        self.shape = shape.to_vec();
        self
    }

    pub fn transposed(&self) -> Self {
        let (n, k) = (self.shape[0], self.shape[1]);
        let values = (0..k).flat_map(|j| (0..n).map(move |i| (i, j))).map(|(i, j)| self.values[i * k + j]).collect();
        Self { shape: vec![k, n], values }
    }

    pub fn followed_by(mut self, other: &Self) -> Self {
        self.shape[0] += other.shape[0];
        self.values.extend_from_slice(&other.values);
        self
    }

    /// Columns of every matrix of a stack `[E, N, K]`: rows `from..to` of each.
    pub fn of_each(&self, from: usize, to: usize) -> Self {
        let (n, k) = (self.shape[1], self.shape[2]);
        let values = self.values.chunks(n * k).flat_map(|m| m[from * k..to * k].to_vec()).collect();
        Self { shape: vec![self.shape[0], to - from, k], values }
    }

    /// llama.cpp's order of the rows of heads that are rotated by neighbours.
    pub fn permuted(&self, heads: usize) -> Self {
        let d = self.shape[0] / heads;
        self.take((0..self.shape[0]).map(|row| row / d * d + row % d / 2 + row % 2 * (d / 2)))
    }
}

/// A reference model under conversion.
pub struct Golden {
    pub config: Json,
    pub checkpoint: Checkpoint,
    pub out: Writer,
    pub arch: String,
}

pub fn open(folder: &Path) -> (Json, Checkpoint) {
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let checkpoint = block_on(Checkpoint::open(Arc::new(Dir::open(folder).unwrap()))).unwrap();
    (serde_json::from_slice(&config).unwrap(), checkpoint)
}

impl Golden {
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }

    pub fn get(&self, name: &str) -> Array {
        let shape = self.checkpoint.info(name).unwrap_or_else(|| panic!("no {name}")).shape.clone();
        let raw = block_on(self.checkpoint.get(name, &shape)).unwrap();
        Array { shape, values: raw.dtype.to_f32(&raw.bytes) }
    }

    pub fn n(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("no {key}")) as usize
    }

    pub fn x(&self, key: &str) -> f64 {
        self.config[key].as_f64().unwrap_or_else(|| panic!("no {key}"))
    }

    pub fn flag(&self, key: &str) -> bool {
        self.config[key].as_bool().unwrap_or(false)
    }

    pub fn key(&mut self, key: &str, value: impl Into<Value>) {
        let key = format!("{}.{key}", self.arch);
        self.out.key(&key, value);
    }

    pub fn put(&mut self, name: impl Into<String>, a: &Array) {
        self.out.f32(name, &a.shape, &a.values);
    }

    pub fn copy(&mut self, from: &str, to: &str) {
        let a = self.get(from);
        self.put(to, &a);
    }

    /// Weights below a prefix, and their biases where there are any.
    pub fn copies(&mut self, p: &str, b: &str, pairs: &[(&str, &str)]) {
        for (from, to) in pairs {
            for leaf in ["weight", "bias"] {
                if self.has(&format!("{p}{from}.{leaf}")) {
                    self.copy(&format!("{p}{from}.{leaf}"), &format!("{b}{to}.{leaf}"));
                }
            }
        }
    }

    pub fn heads(&mut self, per_layer: Option<&dyn Fn(usize) -> bool>, layers: usize) {
        let (nq, nk) = (self.n("num_attention_heads"), self.n("num_key_value_heads"));
        let hd = self.config["head_dim"].as_u64().map_or(self.n("hidden_size") / nq, |n| n as usize);
        self.key("attention.head_count", nq);
        match per_layer {
            None => self.key("attention.head_count_kv", nk),
            Some(attends) => {
                let list: Vec<usize> = (0..layers).map(|i| if attends(i) { nk } else { 0 }).collect();
                self.key("attention.head_count_kv", list);
            }
        }
        self.key("attention.key_length", hd);
        self.key("attention.value_length", hd);
    }

    pub fn rope(&mut self, hd: usize) {
        let rope = &self.config["rope_parameters"];
        let theta = rope["rope_theta"].as_f64().unwrap_or(10_000.0);
        let part = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        self.key("rope.freq_base", theta);
        self.key("rope.dimension_count", (hd as f64 * part + 1e-6) as usize);
    }

    /// q, k, v and the output projection, q and k permuted if asked for.
    pub fn attention(&mut self, p: &str, b: &str, permuted: bool, output: &str) {
        let (nq, nk) = (self.n("num_attention_heads"), self.n("num_key_value_heads"));
        for (from, to, heads) in [("q_proj", "attn_q", nq), ("k_proj", "attn_k", nk)] {
            for leaf in ["weight", "bias"] {
                if self.has(&format!("{p}{from}.{leaf}")) {
                    let a = self.get(&format!("{p}{from}.{leaf}"));
                    let a = if permuted { a.permuted(heads) } else { a };
                    self.put(format!("{b}{to}.{leaf}"), &a);
                }
            }
        }
        self.copies(p, b, &[("v_proj", "attn_v"), (output, "attn_output")]);
    }

    pub fn mamba2(&mut self, p: &str, b: &str, groups: usize) {
        self.copies(p, b, &[("in_proj", "ssm_in"), ("out_proj", "ssm_out")]);
        let conv = self.get(&format!("{p}conv1d.weight"));
        let (c, k) = (conv.shape[0], conv.shape[2]);
        self.put(format!("{b}ssm_conv1d.weight"), &conv.reshape(&[c, k]));
        if self.has(&format!("{p}conv1d.bias")) {
            self.copy(&format!("{p}conv1d.bias"), &format!("{b}ssm_conv1d.bias"));
        }
        self.copy(&format!("{p}dt_bias"), &format!("{b}ssm_dt.bias"));
        for (from, to) in [("A_log", "ssm_a"), ("D", "ssm_d")] {
            let a = self.get(&format!("{p}{from}"));
            let h = a.shape[0];
            let a = if from == "D" { a } else { a.map(|x| -x.exp()) };
            self.put(format!("{b}{to}"), &a.reshape(&[h, 1]));
        }
        if self.has(&format!("{p}norm.weight")) {
            let norm = self.get(&format!("{p}norm.weight"));
            let inner = norm.shape[0];
            self.put(format!("{b}ssm_norm.weight"), &norm.reshape(&[groups, inner / groups]));
        }
    }

    pub fn mamba1(&mut self, p: &str, b: &str) {
        let pairs = [("in_proj", "ssm_in"), ("x_proj", "ssm_x"), ("dt_proj", "ssm_dt"), ("out_proj", "ssm_out")];
        self.copies(p, b, &pairs);
        let conv = self.get(&format!("{p}conv1d.weight"));
        let (c, k) = (conv.shape[0], conv.shape[2]);
        self.put(format!("{b}ssm_conv1d.weight"), &conv.reshape(&[c, k]));
        self.copy(&format!("{p}conv1d.bias"), &format!("{b}ssm_conv1d.bias"));
        let a = self.get(&format!("{p}A_log")).map(|x| -x.exp());
        self.put(format!("{b}ssm_a"), &a);
        self.copy(&format!("{p}D"), &format!("{b}ssm_d"));
    }

    /// Matrices of experts, stored one by one, as a stack.
    pub fn stack(&mut self, p: &str, pairs: &[(&str, &str)], b: &str) {
        for (from, to) in pairs {
            let (mut values, mut shape) = (Vec::new(), vec![0]);
            while self.has(&format!("{p}{}.{from}.weight", shape[0])) {
                let one = self.get(&format!("{p}{}.{from}.weight", shape[0]));
                values.extend(one.values);
                shape = vec![shape[0] + 1, one.shape[0], one.shape[1]];
            }
            self.put(format!("{b}{to}.weight"), &Array { shape, values });
        }
    }

    pub fn mlp(&mut self, p: &str, b: &str) {
        self.copies(p, b, &[("gate_proj", "ffn_gate"), ("up_proj", "ffn_up"), ("down_proj", "ffn_down")]);
    }
}
