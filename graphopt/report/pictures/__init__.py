"""Programs, memory timelines and frontiers as SVG."""
