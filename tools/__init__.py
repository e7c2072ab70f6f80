from config.removed import refuse_command

refuse_command()
