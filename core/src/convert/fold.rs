//! What a file says by its weights alone: factors that it has no keys for, and copies of key heads.

use std::collections::BTreeMap;

use crate::{
    blocks::{Plan, attention, gated_delta::Projections, mamba2, mlp},
    models::Architecture,
    rope::RopeScaling,
};

/// Factors on rows of weights, by their names below the model's prefix: one for all rows, or one for each.
pub(super) type Factors = BTreeMap<String, Vec<f32>>;

/// The plan of each layer's attention, if it has one.
pub(super) fn attention_layers(a: &Architecture) -> impl Iterator<Item = Option<&attention::Plan>> {
    a.layers.iter().map(|layer| {
        layer.iter().flat_map(|s| &s.branches).find_map(|b| match &b.plan {
            Plan::Attention(p) => Some(p),
            _ => None,
        })
    })
}

/// Takes the factors off an architecture for whose files there are no keys of them.
pub(super) fn factors(a: &mut Architecture) -> Factors {
    let mut factors = Factors::new();
    let mut put = |name: String, of: Vec<f32>| {
        if of.iter().any(|x| *x != 1.0) {
            factors.insert(name, of);
        }
    };
    put(a.embedding[0].into(), vec![std::mem::replace(&mut a.embedding_scale, 1.0)]);
    put("lm_head.weight".into(), vec![std::mem::replace(&mut a.logits_scale, 1.0)]);
    for branch in a.layers.iter_mut().flatten().flat_map(|step| &mut step.branches) {
        let (prefix, scale) = (branch.prefix.clone(), branch.scale);
        // A factor on a layer's output is one on its bias too, a factor on its input is not.
        let mut both = |leaf: &str, of: Vec<f32>, bias: Vec<f32>| {
            put(format!("{prefix}{leaf}.weight"), of);
            put(format!("{prefix}{leaf}.bias"), bias);
        };
        match &mut branch.plan {
            Plan::Attention(p) => of_attention(p, scale, &mut both),
            Plan::Mamba2(p) => of_mamba2(p, scale, &mut both),
            Plan::Mlp(p) => of_mlp(p, scale, &mut both),
            _ => continue,
        }
        branch.scale = 1.0;
    }
    factors
}

fn of_attention(p: &mut attention::Plan, scale: f32, both: &mut impl FnMut(&str, Vec<f32>, Vec<f32>)) {
    both("q_proj", vec![p.input_scale], vec![1.0]);
    both("k_proj", vec![p.input_scale * p.key_scale], vec![p.key_scale]);
    both("v_proj", vec![p.input_scale], vec![1.0]);
    both(p.output, vec![scale], vec![scale]);
    (p.input_scale, p.key_scale) = (1.0, 1.0);
}

fn of_mamba2(p: &mut mamba2::Plan, scale: f32, both: &mut impl FnMut(&str, Vec<f32>, Vec<f32>)) {
    let (inner, bc) = (p.heads * p.head_dim, p.groups * p.state);
    let rows = [inner, inner, bc, bc, p.heads].into_iter().zip(p.scales);
    let rows: Vec<f32> = rows.flat_map(|(n, scale)| std::iter::repeat_n(scale, n)).collect();
    both("in_proj", rows.iter().map(|x| x * p.input_scale).collect(), rows);
    both("out_proj", vec![scale], vec![scale]);
    (p.input_scale, p.scales) = (1.0, [1.0; 5]);
}

fn of_mlp(p: &mut mlp::Plan, scale: f32, both: &mut impl FnMut(&str, Vec<f32>, Vec<f32>)) {
    if let mlp::Input::Separate { gate, .. } = p.input {
        both(gate, vec![p.gate_scale], vec![p.gate_scale]);
        p.gate_scale = 1.0;
    }
    both(p.output, vec![scale], vec![scale]);
}

/// The architecture as a reader of the file sees it: each value head has a key head of its own where the file's order of heads
/// asks for that. What is compared in another way is left out.
pub(super) fn as_read(a: &Architecture) -> Architecture {
    let mut a = a.clone();
    a.eos.clear();
    for plan in a.layers.iter_mut().flatten().flat_map(|s| &mut s.branches).map(|b| &mut b.plan) {
        match plan {
            Plan::GatedDelta(p) if p.projections == Projections::Separate => p.key_heads = p.value_heads,
            Plan::Attention(attention::Plan { rope: Some(rope), .. })
                if matches!(rope.scaling, RopeScaling::Llama3 { .. }) =>
            {
                rope.scaling = RopeScaling::None;
            }
            _ => {}
        }
    }
    a
}
