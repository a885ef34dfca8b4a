# How tests start torchrun: on a free port, and by numbers alone. Where there is no /etc/hosts the name `localhost`, by
# which --standalone finds itself, has no address, nor has the machine's own.
import sys

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
)
