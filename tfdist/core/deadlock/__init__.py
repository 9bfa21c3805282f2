"""Detects collectives that cannot end because some ranks do not call them."""
