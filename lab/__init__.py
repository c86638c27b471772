"""The papers' questions: python -m lab.sweep, python -m lab.routing RUN, python -m lab.bench."""
