//! Properties of whole models on the CPU backend. No bit depends on how a text is cut into steps, rows and chunks, on
//! captures and forks, or on how weights and pools are split into bindings.

use std::{path::Path, sync::Arc};

use pollster::block_on;
use proptest::prelude::*;

use super::*;
use crate::{
    backend::Caps,
    checkpoint::Checkpoint,
    config::Config,
    cpu::{Buf, CpuBackend, Rec, Tape},
    models,
    ops::Op,
    source::{Bytes, Dir},
    weights::Loader,
};

const LIMITS: Limits = Limits { max_tokens: 256, max_outputs: 256 };
/// One of each kind of layer and of each kind of state: with and without attention, with experts, dense.
const FOLDERS: [&str; 10] = [
    "nemotron_h",
    "nemotron_h_moe",
    "mamba2",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3",
    "jamba",
    "lfm2_moe",
    "falcon_h1",
    "olmo_hybrid",
];

fn load<B: Backend>(backend: &B, folder: &str) -> Box<dyn Model<B>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(folder);
    let config = Config::parse("config.json", &std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let checkpoint = block_on(Checkpoint::open(Arc::new(Dir::open(dir).unwrap()))).unwrap();
    let mut report = |_| ();
    let mut loader = Loader::new(backend, &checkpoint, &mut report);
    block_on(models::build(&models::read(&config).unwrap(), &mut loader, LIMITS)).unwrap()
}

fn ids(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| 3 + (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(97)) >> 7) % 300).collect()
}

/// Logits and final states of a prompt in one step.
fn whole<B: Backend>(backend: &B, model: &dyn Model<B>, ids: &[u32]) -> (Vec<f32>, Vec<LayerValues>) {
    let mut direct = Direct::new(backend, model, LIMITS, 2, 8).unwrap();
    let mut sequence = Sequence::default();
    let logits = block_on(direct.prompt(&mut sequence, ids, &[])).unwrap();
    (logits, block_on(direct.states(&sequence)).unwrap())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn same_states(a: &[LayerValues], b: &[LayerValues]) -> bool {
    let all = |layers: &[LayerValues]| {
        let one = |l: &LayerValues| {
            let kv = l.kv.iter().flat_map(|(k, v)| [k, v]);
            l.conv.iter().chain(&l.recurrent).chain(kv).flat_map(|v| bits(v)).collect::<Vec<_>>()
        };
        layers.iter().map(one).collect::<Vec<_>>()
    };
    all(a) == all(b)
}

fn cases(n: u32) -> ProptestConfig {
    ProptestConfig { cases: n, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn steps_chunks_and_captures_change_no_bit(
        folder in 0..FOLDERS.len(),
        seed in 0u32..1000,
        n in 1usize..200,
        steps in prop::collection::vec((1usize..90, prop::collection::vec((0usize..90, any::<bool>()), 0..4)), 0..8),
    ) {
        let backend = CpuBackend::new();
        let model = load(&backend, FOLDERS[folder]);
        let ids = ids(n, seed);
        let (want, states) = whole(&backend, &*model, &ids);
        let vocab = model.spec().vocab;
        let mut direct = Direct::new(&backend, &*model, LIMITS, 40, 160).unwrap();
        let (mut s, mut got, mut captures) = (Sequence::default(), Vec::new(), Vec::new());
        let mut steps = steps.into_iter();
        while s.len < n {
            let (tokens, cuts) = steps.next().unwrap_or((n, Vec::new()));
            let tokens = tokens.min(n - s.len);
            let mut cuts: Vec<Cut> = cuts
                .into_iter()
                .map(|(at, capture)| (1 + at % tokens, capture))
                // With attention a state can be continued on the grid only.
                .map(|(at, capture)| Cut { at, capture: capture && (!direct.has_pages || (s.len + at).is_multiple_of(PAGE)) })
                .collect();
            if direct.has_pages && tokens >= PAGE - s.len % PAGE {
                cuts.push(Cut { at: PAGE - s.len % PAGE, capture: true });
            }
            cuts.sort_by_key(|c| (c.at, !c.capture));
            cuts.dedup_by_key(|c| c.at);
            let now = &ids[s.len..s.len + tokens];
            let mut shares = [Share { sequence: &mut s, ids: now, cuts: &cuts }];
            let mut computed = block_on(direct.step(&mut shares)).unwrap();
            got.append(&mut computed[0].logits);
            captures.append(&mut computed[0].captures);
        }
        prop_assert_eq!(bits(&got), bits(&want));
        prop_assert!(same_states(&block_on(direct.states(&s)).unwrap(), &states));
        // Every captured state reaches the same end, concurrently with the others and after them.
        for mut c in captures {
            let from = c.len;
            if from < n {
                let rest = block_on(direct.prompt(&mut c, &ids[from..], &[7, 64])).unwrap();
                prop_assert_eq!(bits(&rest), bits(&want[from * vocab..]));
            }
            prop_assert!(same_states(&block_on(direct.states(&c)).unwrap(), &states));
            direct.release(c);
        }
        prop_assert!(same_states(&block_on(direct.states(&s)).unwrap(), &states));
        direct.release(s);
        prop_assert!(direct.slots.iter().chain(&direct.pages).all(|holders| *holders == 0), "a slot or page leaks");
    }

    #[test]
    fn forks_and_neighbours_change_no_bit(
        folder in 0..FOLDERS.len(),
        seed in 0u32..1000,
        common in 1usize..130,
        tails in (1usize..60, 1usize..60),
        together in any::<bool>(),
    ) {
        let backend = CpuBackend::new();
        let model = load(&backend, FOLDERS[folder]);
        let mut direct = Direct::new(&backend, &*model, LIMITS, 8, 16).unwrap();
        let common = if direct.has_pages { common.next_multiple_of(PAGE) } else { common };
        let (stem, tails) = (ids(common, seed), [ids(tails.0, seed + 1), ids(tails.1, seed + 2)]);
        let mut first = Sequence::default();
        block_on(direct.prompt(&mut first, &stem, &[])).unwrap();
        let mut second = direct.fork(&first).unwrap();
        let mut logits = vec![Vec::new(), Vec::new()];
        if together {
            let mut shares = [
                Share { sequence: &mut first, ids: &tails[0], cuts: &[] },
                Share { sequence: &mut second, ids: &tails[1], cuts: &[] },
            ];
            let computed = block_on(direct.step(&mut shares)).unwrap();
            logits = computed.into_iter().map(|c| c.logits).collect();
        } else {
            logits[1] = block_on(direct.prompt(&mut second, &tails[1], &[])).unwrap();
            logits[0] = block_on(direct.prompt(&mut first, &tails[0], &[1, 1])).unwrap();
        }
        for (i, sequence) in [first, second].iter().enumerate() {
            let (want, states) = whole(&backend, &*model, &[stem.clone(), tails[i].clone()].concat());
            prop_assert_eq!(bits(&logits[i]), bits(&want[common * model.spec().vocab..]), "branch {}", i);
            prop_assert!(same_states(&block_on(direct.states(sequence)).unwrap(), &states), "branch {}", i);
        }
    }
}

#[test]
fn a_fork_inside_a_page_is_refused() {
    let backend = CpuBackend::new();
    let model = load(&backend, "qwen3");
    let mut direct = Direct::new(&backend, &*model, LIMITS, 2, 4).unwrap();
    let mut sequence = Sequence::default();
    block_on(direct.prompt(&mut sequence, &ids(10, 0), &[])).unwrap();
    assert!(direct.fork(&sequence).unwrap_err().to_string().contains("token 10"));
}

/// The CPU with the limits of a small GPU: it adopts nothing, and a binding holds few bytes.
struct Small {
    cpu: CpuBackend,
    caps: Caps,
}

impl Backend for Small {
    type Buf = Buf;
    type Rec<'a> = Rec<'a>;
    type Tape = Tape;
    type Read = <CpuBackend as Backend>::Read;

    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        self.cpu.alloc(label, bytes)
    }
    fn adopt(&self, _: &Bytes) -> Option<Buf> {
        None
    }
    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        assert!(at.is_multiple_of(4) && bytes.len().is_multiple_of(4), "GPUs are written in words");
        self.cpu.write(dst, at, bytes)
    }
    fn scratch(&self, op: &Op<Buf>) -> u64 {
        self.cpu.scratch(op)
    }
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.cpu.reserve(bytes)
    }
    fn run(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        self.cpu.run(f)
    }
    fn record(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Tape> {
        self.cpu.record(f)
    }
    fn play(&self, tape: &Tape) -> Result<()> {
        self.cpu.play(tape)
    }
    fn read(&self, src: &Tensor<Buf>) -> Self::Read {
        self.cpu.read(src)
    }
}

#[test]
fn gathered_weights_and_split_pools_change_no_bit() {
    let cpu = CpuBackend::new();
    let ids = ids(100, 1);
    for folder in FOLDERS {
        let want = whole(&cpu, &*load(&cpu, folder), &ids);
        // The first splits matrices, experts and pools several times, the second puts several experts into a buffer.
        for max_binding in [12_000, 40_000, u64::MAX] {
            let caps = Caps { max_binding, ..cpu.caps().clone() };
            let small = Small { cpu: CpuBackend::new(), caps };
            let model = load(&small, folder);
            // The smallest binding does not hold three pages of one KV head, so the error must say that; models without
            // attention run.
            let mut direct = match Direct::new(&small, &*model, LIMITS, 2, 2) {
                Ok(direct) => direct,
                Err(e) => {
                    assert!(
                        max_binding == 12_000 && e.to_string().contains("too many for this device"),
                        "{folder}: {e}"
                    );
                    continue;
                }
            };
            let mut sequence = Sequence::default();
            let logits = block_on(direct.prompt(&mut sequence, &ids, &[])).unwrap();
            assert_eq!(bits(&logits), bits(&want.0), "{folder} in bindings of {max_binding}");
            assert!(same_states(&block_on(direct.states(&sequence)).unwrap(), &want.1), "{folder}, {max_binding}");
        }
    }
}
