"""usage: nvrtc.py TOOLKIT 'sm_80 sm_90' FILE.cu...

Compiles each file for each architecture through libnvrtc and says how large the code is. Exit status 1 where one does not compile.
Files include each other from the folder that they lie in, as they do in the engine.
"""

import ctypes
import os
import sys


def compile_kernel(lib, toolkit, path, arch):
    """The size of the machine code, or None and the compiler's log printed."""
    with open(path, "rb") as f:
        source = f.read()
    program = ctypes.c_void_p()
    if lib.nvrtcCreateProgram(ctypes.byref(program), source, os.fsencode(path), 0, None, None) != 0:
        sys.exit(f"nvrtc takes no program at all for {path}")
    include = [os.path.dirname(os.path.abspath(path)), f"{toolkit}/include", f"{toolkit}/include/cccl"]
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-I{folder}" for folder in include)]
    arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = lib.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    if log.value.strip():
        print(log.value.decode(errors="replace"))
    if status == 0:
        status = lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return size.value if status == 0 and size.value else None


def main():
    toolkit, archs, *paths = sys.argv[1:]
    lib = ctypes.CDLL(f"{toolkit}/lib/libnvrtc.so.13")
    failed = 0
    for path in paths:
        for arch in archs.split():
            size = compile_kernel(lib, toolkit, path, arch)
            failed += size is None
            print(f"{os.path.basename(path)} {arch}: {'does not compile' if size is None else f'{size} bytes'}")
    print(f"{len(paths)} files, {failed} failures")
    sys.exit(1 if failed else 0)


main()
