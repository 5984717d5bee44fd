"""Capture of large models on the meta device: no weight is allocated, so a laptop can plan for a cluster.

    python benchmarks/large.py NAME          capture one and print its row as JSON
    python benchmarks/capture.py --large     capture all, each in a process of its own, and print the table

Seconds are CPU seconds of this process (`time.process_time`): `import_s` for importing torch and transformers,
`build_s` for building the modules, `capture_s` for the capture and the blocks.  `peak_mb` is the process's largest
resident memory including the libraries (about 350 MB), `growth_mb` what of it came after the modules were built.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

LLAMA = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 4_096}
LARGE = {
    "llama-70b": LLAMA
    | {"num_hidden_layers": 80, "hidden_size": 8_192, "intermediate_size": 28_672, "num_attention_heads": 64},
    "llama-405b": LLAMA
    | {"num_hidden_layers": 126, "hidden_size": 16_384, "intermediate_size": 53_248, "num_attention_heads": 128},
    "1000-layers": {
        "vocab_size": 1_000,
        "num_hidden_layers": 1_000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4_096,
    },
}
"""Configurations of Llama: the published sizes of Llama 3.1, and a deep stack of narrow layers."""
LIMITS = {"llama-70b": (15.0, 1_000), "llama-405b": (30.0, 2_000)}
"""The most CPU seconds of a capture and the most MB of peak memory that are accepted."""
ROWS, LENGTH = 8, 4_096


def measure(name):
    """Return one large model's row."""
    start = time.process_time()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from partita.partitioner.coarsen import coarsen
    from partita.tracer.capture import capture_model

    torch.set_num_threads(1)
    imported = time.process_time()
    config = LlamaConfig(use_cache=False, **LARGE[name])
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    built, before = time.process_time(), peak_mb()
    graph = capture_model(model, {"input_ids": ids, "labels": ids}).graph
    blocks = coarsen(graph)
    done, peak = time.process_time(), peak_mb()
    decoders = [block for block in blocks if decoder_layers(graph, block) > 0]
    kinds = {block.id if block.repeat_of is None else block.repeat_of for block in decoders}
    return {
        "model": name,
        "parameters (10^9)": round(sum(p.numel() for p in model.parameters()) / 1e9, 2),
        "operators": len(graph.ops),
        "items": len(graph.items),
        "blocks": len(blocks),
        "decoder blocks": len(decoders),
        "distinct": len(kinds),
        "import_s": round(imported - start, 1),
        "build_s": round(built - imported, 1),
        "capture_s": round(done - built, 1),
        "peak_mb": round(peak),
        "growth_mb": round(peak - before),
        "rows": graph.batch_rows,
    }


def decoder_layers(graph, block):
    """Return how many items of a block run modules of a decoder layer."""
    return sum(".layers." in graph.items[item].module_path for item in block.items)


def peak_mb():
    """Return the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure_all():
    """Measure every large model in a process of its own; return the rows and how many break a limit."""
    rows, bad = [], 0
    for name in LARGE:
        run = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=False)
        if run.returncode:
            print("BAD ", name, run.stderr.strip().splitlines()[-1])
            bad += 1
            continue
        row = json.loads(run.stdout.strip().splitlines()[-1])
        seconds, megabytes = LIMITS.get(name, (float("inf"), float("inf")))
        wrong = row["capture_s"] > seconds or row["peak_mb"] > megabytes
        bad += wrong
        rows.append(row)
        print("BAD " if wrong else "ok  ", *(f"{k}={v}" for k, v in row.items()), flush=True)
    return rows, bad


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    print(json.dumps(measure(sys.argv[1])))
