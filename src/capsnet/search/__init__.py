"""Hyper-parameter search with Optuna (`capsnet search`) and ablation (`capsnet ablate`).

space.py     what is searched: config fields, each with choices or a range
base.py      the config that searches and ablations start from
study.py     trials: trainings judged on validation images
storage.py   where trials are stored for all workers
workers.py   the processes that run trials
report.py    results: importance, error against time, the command that trains the best
ablation.py  one change at a time against a base, over seeds (needs no Optuna)
"""
