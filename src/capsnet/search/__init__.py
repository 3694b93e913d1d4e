"""Hyperparameter search with Optuna (`capsnet search`).

space.py     what is searched: settings, each with choices or a range
study.py     trials: trainings judged on validation images
storage.py   where trials are stored for all workers
workers.py   the processes that run trials
report.py    results: importance, error against time, the command that trains the best
"""
