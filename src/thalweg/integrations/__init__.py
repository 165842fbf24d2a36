"""Adapters for trainers: each module needs the package it is named after, and is imported by name.

``import thalweg.integrations.timm`` loads timm. This module loads nothing.
"""
