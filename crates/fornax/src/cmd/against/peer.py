"""llama.cpp as the other side of a race: loads a model, then runs one timed round for every line on stdin.

Arguments: MODEL PROMPT GENERATE DEPTH THREADS. Each answer is one JSON line; times are in seconds, and a part whose size
is 0 is null.
"""

import ctypes
import json
import sys
import time

import llama_cpp as lib

def fail(what):
    print(json.dumps({"error": what}), flush=True)
    sys.exit(1)


class Peer:
    def __init__(self, path, cells, threads):
        self.silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self.silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            fail(f"llama.cpp cannot load {path}")
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        options = lib.llama_context_default_params()
        options.n_ctx = cells + 256
        options.n_batch = 2048
        options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            fail(f"llama.cpp has no room for a context of {options.n_ctx}")

    def token(self, i):
        return (i * 2654435761 & 0xFFFFFFFF) % self.words

    def forget(self):
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def feed(self, tokens):
        for start in range(0, len(tokens), 2048):
            piece = tokens[start : start + 2048]
            ids = (lib.llama_token * len(piece))(*piece)
            if lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(piece))):
                fail("llama_decode failed")
        lib.llama_synchronize(self.context)

    def prompt(self, n, depth):
        self.forget()
        tokens = [self.token(i) for i in range(depth + n)]
        if depth:
            self.feed(tokens[:depth])
        begin = time.perf_counter()
        self.feed(tokens[depth:])
        return time.perf_counter() - begin

    def generate(self, n, depth):
        self.forget()
        self.feed([self.token(i) for i in range(depth + 1)])
        begin = time.perf_counter()
        for i in range(n):
            self.feed([self.token(depth + 1 + i)])
        return time.perf_counter() - begin


def main():
    path = sys.argv[1]
    prompt, generate, depth, threads = (int(word) for word in sys.argv[2:])
    peer = Peer(path, depth + max(prompt, generate + 1), threads)
    print(json.dumps({"version": lib.__version__}), flush=True)
    for _ in sys.stdin:
        answer = {
            "prompt_s": peer.prompt(prompt, depth) if prompt else None,
            "generate_s": peer.generate(generate, depth) if generate else None,
        }
        print(json.dumps(answer), flush=True)


main()
