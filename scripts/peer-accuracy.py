"""How far llama.cpp is from exact logits, prompt by prompt, in testdata/peer-accuracy.json; scripts/peer-accuracy.sh calls it.

usage: peer-accuracy.py FOLDER TESTDATA
FOLDER has MODEL.json (prompts) and MODEL.f32 (exact logits after every token) for each model. One thread, F16 cache, no
flash attention: what the library does by default.
"""

import ctypes
import json
import pathlib
import sys

import llama_cpp as lib
import numpy as np


def after_every_token(context, tokens, vocab):
    """Logits of one prompt, a row a token."""
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for at, token in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.logits[at] = token, at, 1
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    status = lib.llama_decode(context, batch)
    if status != 0:
        sys.exit(f"llama_decode says {status}")
    rows = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(tokens), vocab)).copy()
    lib.llama_batch_free(batch)
    return rows


def distance(model_file, prompts, exact):
    """Mean difference of each prompt's logits."""
    options = lib.llama_model_default_params()
    options.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(model_file).encode(), options)
    if not model:
        sys.exit(f"llama.cpp does not load {model_file}")
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    options = lib.llama_context_default_params()
    options.n_ctx = options.n_batch = 512
    options.n_threads = options.n_threads_batch = 1
    options.flash_attn_type = 0
    context = lib.llama_init_from_model(model, options)
    exact = exact.reshape(len(prompts), -1, vocab)
    gaps = [np.abs(after_every_token(context, t, vocab) - e) for t, e in zip(prompts, exact)]
    means = [float(g.mean(dtype=np.float64)) for g in gaps]
    lib.llama_free(context)
    lib.llama_model_free(model)
    return means


def main():
    folder, testdata = map(pathlib.Path, sys.argv[1:])
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    models = {}
    for file in sorted(folder.glob("*.json")):
        prompts = json.loads(file.read_text())["prompts"]
        exact = np.fromfile(file.with_suffix(".f32"), np.float32)
        models[file.stem] = distance(testdata / "models" / file.stem / "model.gguf", prompts, exact)
        print(file.stem, sum(models[file.stem]) / len(prompts))
    out = {"by": f"llama-cpp-python {lib.__version__}, one thread, F16 cache", "models": models}
    (testdata / "peer-accuracy.json").write_text(json.dumps(out) + "\n")


main()
