#!/usr/bin/env python3
"""Trains the demo model (needs torch and transformers), resumes, or exports: see --help and demo_model/train.py."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model.train import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
