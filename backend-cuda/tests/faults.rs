//! Failures become errors that say what to look at.
//!
//! On a device the last test brings the context down, so the tests run one after the other, in this order. Without one they
//! are ignored; `SELKIE_REQUIRE=cuda,nvrtc` turns that into a failure.

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_core::{
    Error,
    backend::{Backend, Ops},
};
use selkie_cuda::{
    Cuda, Options, nvrtc,
    spec::{File, Spec},
};

mod paged;

fn main() {
    // Named only on request, since that costs time.
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("SELKIE_CUDA_NAME_FAULTS", "1") };
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    let required = |what: &str| std::env::var("SELKIE_REQUIRE").is_ok_and(|v| v.split(',').any(|r| r == what));
    let no_device = matches!(Cuda::open(Options::default()), Err(Error::NoDevice { .. })) && !required("cuda");
    let no_compiler = nvrtc::missing().is_some() && !required("nvrtc");
    let trials = vec![
        Trial::test("a kernel that does not compile", compile).with_ignored_flag(no_compiler),
        Trial::test("free memory", what_is_left).with_ignored_flag(no_device),
        Trial::test("an allocation that does not fit", memory).with_ignored_flag(no_device),
        Trial::test("a bad address in a recorded step", address).with_ignored_flag(no_device),
    ];
    libtest_mimic::run(&args, trials).exit();
}

/// Names file, line and variant.
fn compile() -> Result<(), Failed> {
    // A gather over a type that does not exist.
    let spec = Spec::new(File::Gather).int("D", 8).int("VEC", 4);
    match nvrtc::compile(&spec, "sm_90a") {
        Err(Error::Compile { label, log })
            if label.contains("gather.cu [D=8, VEC=4] for sm_90a") && log.contains("gather.cu(4): error") =>
        {
            Ok(())
        }
        other => Err(format!("{other:?}").into()),
    }
}

/// Memory that is left for states and pages after loading the weights.
fn what_is_left() -> Result<(), Failed> {
    let cuda = Cuda::open(Options::default()).map_err(|e| e.to_string())?;
    let before = cuda.free_memory();
    let _weights = cuda.alloc("weights", 1 << 30).map_err(|e| e.to_string())?;
    match (before, cuda.free_memory()) {
        (Some(before), Some(after)) if after + (1 << 30) <= before => Ok(()),
        other => Err(format!("free before and after 1 GiB was taken: {other:?}").into()),
    }
}

/// Names the allocation, the bytes requested and the bytes free.
fn memory() -> Result<(), Failed> {
    let cuda = Cuda::open(Options::default()).map_err(|e| e.to_string())?;
    match cuda.alloc("keys of layer 3", 1 << 50) {
        Err(Error::OutOfMemory { what, asked, free }) if what == "keys of layer 3" && asked == 1 << 50 && free > 0 => {
            Ok(())
        }
        other => Err(format!("{other:?}").into()),
    }
}

/// An attention over a page that does not exist: the error names the op, wherever it is noticed.
fn address() -> Result<(), Failed> {
    let run = || -> selkie_core::Result<Vec<u8>> {
        let cuda = Cuda::open(Options::default())?;
        let (bucket, bytes) = paged::step(1 << 29);
        let ints = cuda.alloc("ints", bytes.len() as u64)?;
        cuda.write(&ints, 0, &bytes)?;
        let op = paged::attention(&cuda, ints, bucket)?;
        let out = op.out.clone();
        cuda.reserve(cuda.scratch(&op.clone().into()))?;
        let tape = cuda.record(|ops| ops.op(op.into()))?;
        cuda.play(&tape)?;
        pollster::block_on(cuda.read(&out))
    };
    match run() {
        Err(Error::Device { op, why }) if op == "attention" && why.contains("CUDA_ERROR_ILLEGAL_ADDRESS") => {
            eprintln!("{why}");
            Ok(())
        }
        other => Err(format!("{other:?}").into()),
    }
}
