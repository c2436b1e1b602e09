"""Boxes that join a deployment by a code: one command on each, a key that stays on it, a certificate on approval."""
