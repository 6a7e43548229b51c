"""Draft heads that other projects have trained, read from their own folders: EAGLE, EAGLE-3 and Medusa."""
