# A forward and backward of a module in one graph of torch's, for workers of CUDA suites. No test here.
import torch


def captured_step(module, x, dy, warmups=3):
    """The graph of module(x).backward(dy), behind warm-ups beside the current stream, and its results, which replays
    write: y, dx and the parameters' gradients by their names."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            module(x).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    x.grad = None
    module.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
        y.backward(dy)
    return graph, {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
