// Does nothing: timed alone, it is what a measurement adds to a kernel.

extern "C" __global__ void ENTRY(PARAMETERS) {}
