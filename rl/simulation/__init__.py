"""Campaigns in virtual time: the real scheduler, a modelled engine and trainer."""
