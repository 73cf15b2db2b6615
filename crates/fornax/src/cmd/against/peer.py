"""llama.cpp as the other side of a race: loads a model, then runs one timed round for every line on stdin.

Arguments: MODEL PROMPT GENERATE DEPTH THREADS, then SEQUENCES PROMPT GENERATE of the part that decodes many sequences in
step. Each answer is one JSON line; times are in seconds, and a part whose size is 0 is null.
"""

import sys

# What lies in the folder that the race is started from is none of its modules.
sys.path[:] = [folder for folder in sys.path if folder]

import ctypes
import json
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
        self.threads = threads
        self.context = self.open(cells + 256, 1)
        self.held = 0

    def open(self, cells, sequences):
        options = lib.llama_context_default_params()
        options.n_ctx = cells
        options.n_seq_max = sequences
        options.n_batch = 2048
        options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = self.threads
        context = lib.llama_init_from_model(self.model, options)
        if not context:
            fail(f"llama.cpp has no room for a context of {options.n_ctx}")
        return context

    def token(self, i):
        return (i * 2654435761 & 0xFFFFFFFF) % self.words

    def dive(self, depth):
        """Leaves the first tokens in the context, and only them; what is there already is kept."""
        memory = lib.llama_get_memory(self.context)
        if depth and self.held == depth and lib.llama_memory_seq_rm(memory, 0, depth, -1):
            return
        lib.llama_memory_clear(memory, True)
        if depth:
            self.feed([self.token(i) for i in range(depth)])
        self.held = depth

    def feed(self, tokens):
        for start in range(0, len(tokens), 2048):
            piece = tokens[start : start + 2048]
            ids = (lib.llama_token * len(piece))(*piece)
            if lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(piece))):
                fail("llama_decode failed")
        lib.llama_synchronize(self.context)

    def prompt(self, n, depth):
        self.dive(depth)
        tokens = [self.token(depth + i) for i in range(n)]
        begin = time.perf_counter()
        self.feed(tokens)
        return time.perf_counter() - begin

    def generate(self, n, depth):
        self.dive(depth)
        self.feed([self.token(depth)])
        begin = time.perf_counter()
        for i in range(n):
            self.feed([self.token(depth + 1 + i)])
        return time.perf_counter() - begin

    def together(self, sequences, prompt, generate):
        """Seconds of `generate` steps in which each sequence takes a token, after prompts of its own."""
        context = self.open(sequences * (prompt + generate + 32), sequences)
        batch = lib.llama_batch_init(2048, 0, 1)

        def step(entries):
            batch.n_tokens = len(entries)
            for at, (token, pos, seq, wanted) in enumerate(entries):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, pos, 1
                batch.seq_id[at][0], batch.logits[at] = seq, wanted
            if lib.llama_decode(context, batch):
                fail("llama_decode failed")
            lib.llama_synchronize(context)

        for seq in range(sequences):
            step([(self.token(seq * 7919 + i), i, seq, i + 1 == prompt) for i in range(prompt)])
        begin = time.perf_counter()
        for i in range(prompt, prompt + generate):
            step([(self.token(seq * 7919 + i), i, seq, True) for seq in range(sequences)])
        seconds = time.perf_counter() - begin
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        return seconds


def main():
    path = sys.argv[1]
    prompt, generate, depth, threads, *batch = (int(word) for word in sys.argv[2:])
    peer = Peer(path, depth + max(prompt, generate + 1), threads)
    print(json.dumps({"version": lib.__version__}), flush=True)
    for _ in sys.stdin:
        answer = {
            "prompt_s": peer.prompt(prompt, depth) if prompt else None,
            "generate_s": peer.generate(generate, depth) if generate else None,
            "batch_s": peer.together(*batch) if batch[0] else None,
        }
        print(json.dumps(answer), flush=True)


main()
