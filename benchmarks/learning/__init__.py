"""What calibrations learn from published runs, fed to them as measurements, and how well that holds
on the other runs.
"""
