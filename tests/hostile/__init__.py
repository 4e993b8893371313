"""Hostile inputs as data (`templates`, `schemas`, `specs`, `files`, `commands`), and one test for each."""
