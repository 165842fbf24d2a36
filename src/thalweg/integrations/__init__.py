"""Adapters for trainers, each imported by name: ``thalweg.integrations.timm`` needs timm.

This module loads nothing.
"""
