// What browsers' WebGPU needs beside wgpu: pipelines that are compiled in parallel.
//
// wgpu creates pipelines by `createComputePipeline`, which the browser's GPU process compiles one after the other. While a model
// loads, `createComputePipelineAsync` is called instead: the engine gets a placeholder, for which `setPipeline` puts in what was
// compiled.

let parallel = false;
const asked = new Set(); // promises of placeholders

const { createComputePipeline } = self.GPUDevice?.prototype ?? {};
const { setPipeline } = self.GPUComputePassEncoder?.prototype ?? {};

if (createComputePipeline) {
  GPUDevice.prototype.createComputePipeline = function (descriptor) {
    const make = () => createComputePipeline.call(this, descriptor);
    // A software adapter has no more threads than the page.
    if (!parallel || this.adapterInfo?.isFallbackAdapter) return make();
    const placeholder = { made: null, make };
    const made = this.createComputePipelineAsync(descriptor).then(
      (pipeline) => void (placeholder.made ??= pipeline),
      () => void (placeholder.made ??= make()), // reports the error to the engine
    );
    asked.add(made);
    made.then(() => asked.delete(made));
    return placeholder;
  };
  GPUComputePassEncoder.prototype.setPipeline = function (pipeline) {
    if (pipeline.make) pipeline = pipeline.made ??= pipeline.make();
    setPipeline.call(this, pipeline);
  };
}

// Runs `load`, whose pipelines are compiled in parallel, and waits for them; `progress(done, total)` is called with each.
export async function withPipelines(load, progress) {
  parallel = true;
  try {
    const loaded = await load();
    const total = asked.size;
    const count = () => progress(total - asked.size, total);
    await Promise.all([...asked].map((made) => made.then(count)));
    return loaded;
  } finally {
    parallel = false;
  }
}
