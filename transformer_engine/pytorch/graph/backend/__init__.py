"""What captures and replays need of a machine: the interface, CUDA graphs, and the stand-in on the CPU."""
