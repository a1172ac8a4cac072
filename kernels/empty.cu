// Does nothing: its time is the overhead of a measurement.

extern "C" __global__ void ENTRY(PARAMETERS) {}
