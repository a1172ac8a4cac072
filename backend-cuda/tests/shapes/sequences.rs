//! Kernels of ops that follow one another in a step.

use super::*;

/// Kernels of both halves of Nemotron-3-Nano's experts with the activation in between, for `tokens` tokens.
pub fn expert_kernels(arch: &str, tokens: usize) -> Vec<File> {
    let mut m = Maker::new(DType::Bf16, DType::F32, Bucket::holding(tokens, 1, 1, 1, 1), true);
    let (d, inner, ids) = (2688, 1856, m.of(DType::U32, &[tokens, 6]));
    let up = experts(&mut m, 128, inner, d, &ids);
    let mid = m.act(&[tokens * 6, inner]);
    let act = Activation { gate: up.out.clone(), up: None, row_gate: None, out: mid.clone(), act: Act::Relu2 };
    let w = RowBlock::plain(m.of(DType::Bf16, &[128, d, inner]), 0);
    let (x, experts) = (mid, vec![ExpertRange { first: 0, experts: 128, blocks: vec![w] }]);
    let (combine, out) = (Some(m.f32(&[tokens, 6])), m.act(&[tokens, d]));
    let down = ExpertMatmul { x, experts, ids, combine, out, scale: 1.0, accumulate: true };
    kernels(arch, vec![up.into(), act.into(), down.into()])
}

/// Kernels of both halves of Qwen3-Next's experts as 8-bit floats with rounded inputs, for `tokens` tokens.
pub fn coded_expert_kernels(arch: &str, tokens: usize) -> Vec<File> {
    let mut m = Maker::new(DType::Bf16, DType::F32, Bucket::holding(tokens, 1, 1, 1, 1), true);
    let (e, d, inner, ids) = (512, 2048, 512, m.of(DType::U32, &[tokens, 10]));
    let mut up = experts(&mut m, e, 2 * inner, d, &ids);
    up.experts[0].blocks[0] = eights(&mut m, e, 2 * inner, d);
    let (gate, second) = (up.out.cols(0, inner), Some(up.out.cols(inner, inner)));
    let act = Activation { gate, up: second, row_gate: None, out: m.act(&[tokens * 10, inner]), act: Act::Silu };
    let rounded = m.act(act.out.dims());
    let rounds = [(m.act(&[tokens, d]), up.x.clone()), (act.out.clone(), rounded.clone())];
    let [first, then] = rounds.map(|(x, out)| Op::from(Round { x, out }));
    let range = ExpertRange { first: 0, experts: e, blocks: vec![eights(&mut m, e, d, inner)] };
    let (combine, out) = (Some(m.f32(&[tokens, 10])), m.act(&[tokens, d]));
    let down = ExpertMatmul { x: rounded, experts: vec![range], ids, combine, out, scale: 1.0, accumulate: true };
    kernels(arch, vec![first, up.into(), act.into(), then, down.into()])
}

/// Kernels of a token's routing and of a product of rounded activations after it, of other inputs.
pub fn rounding_kernels(arch: &str) -> Vec<File> {
    let mut m = Maker::new(DType::Bf16, DType::F32, Bucket::holding(1, 1, 1, 1, 1), true);
    let (step, logits, ids, weights) = (m.step.clone(), m.f32(&[1, 64]), m.of(DType::U32, &[1, 4]), m.f32(&[1, 4]));
    let route = Route { step, logits, bias: None, ids, weights, router: Router::SoftmaxTopK { renorm: true } };
    let (x, rounded, out, w) = (m.act(&[1, 512]), m.act(&[1, 512]), m.act(&[1, 256]), m.codes(Format::F8, 256, 512));
    let round = Round { x, out: rounded.clone() };
    let product = Matmul { x: rounded, w, columns: None, bias: None, out, scale: 1.0, accumulate: false };
    kernels(arch, vec![route.into(), round.into(), product.into()])
}

/// Kernels of ops that follow one another in a step.
fn kernels(arch: &str, ops: Vec<Op<Fake>>) -> Vec<File> {
    let mut files = Vec::new();
    let mut sequencer = Sequencer::new(device(arch, 227 << 10, true));
    let arena = &mut |_: u64| Ok(ARENA);
    let emit = &mut |planned: Planned<Fake>| {
        files.extend(planned.work.iter().filter_map(|w| match w {
            Work::Kernel(l) => Some(l.spec.file()),
            Work::Gemm(_) => None,
        }));
        Ok(())
    };
    for op in ops {
        sequencer.push(op, arena, emit).expect("a shape of a supported model");
    }
    sequencer.finish(arena, emit).expect("a shape of a supported model");
    files
}
