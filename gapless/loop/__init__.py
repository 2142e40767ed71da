"""THE loop: plan, launch, observe, commit, retire. Its step records, its depth, its watchdog."""
