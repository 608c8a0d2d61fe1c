"""Experiments. Behind extras; the library never imports it."""
