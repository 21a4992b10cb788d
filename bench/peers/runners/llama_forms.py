"""Writes a GGUF file in another form. Runs in llama.cpp's environment: llama_forms.py SOURCE F32|Q8_0|Q4_0 TARGET"""

import ctypes
import os
import sys
from pathlib import Path

import llama_cpp

FORMS = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}

source, form, target = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = FORMS[form], True, os.cpu_count()
aside = f"{target}.partial"
if llama_cpp.llama_model_quantize(source.encode(), aside.encode(), ctypes.byref(params)):
    sys.exit(f"llama.cpp could not write {source} as {form}")
Path(aside).replace(target)
