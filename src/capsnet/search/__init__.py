"""Hyper-parameter search on Optuna, and the ablation of single choices: `capsnet search`.

space.py     what is searched: fields of the config, each with its choices or its range
study.py     one trial is one training, judged on validation images
storage.py   where trials are kept for all workers, and what goes wrong with that
report.py    what came out: importance, error against time, the command that trains the best
ablation.py  one choice at a time against a base, over seeds (needs no Optuna)
"""
